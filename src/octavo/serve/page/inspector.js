// Asking the map: pointer, touch and keyboard move a cursor over the blocks, and a tip tells who holds one.

import { CACHED, FREE } from "./feed.js";
import { nameOf, phaseOf } from "./rows.js";

export class Inspector {
  #map;
  #engine;
  #canvas;
  #tip;
  #cursor;
  #onChoose;
  #block = null;
  #isByKey = false;

  /** `onChoose(seqId | null)` is called when a block's request is clicked or entered, or let go. */
  constructor({ map, engine, canvas, tip, cursor, onChoose }) {
    this.#map = map;
    this.#engine = engine;
    this.#canvas = canvas;
    this.#tip = tip;
    this.#cursor = cursor;
    this.#onChoose = onChoose;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#isByKey || this.#go(null));
    canvas.addEventListener("click", (event) => {
      this.#point(event);
      this.#choose();
    });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.addEventListener("focus", () => {
      if (!canvas.matches(":focus-visible")) return;
      this.#isByKey = true;
      this.#go(Math.min(this.#block ?? 0, this.#map.numShown - 1));
    });
    canvas.addEventListener("blur", () => {
      this.#isByKey = false;
      this.#go(null);
    });
  }

  /** The engine changed: what the tip says may be old. */
  refresh() {
    if (this.#block !== null) this.#go(this.#block);
  }

  #point(event) {
    this.#isByKey = false;
    this.#go(this.#map.blockAt(event.offsetX, event.offsetY));
  }

  #choose() {
    if (this.#block === null) return;
    const [first] = this.#engine.holdersOf(this.#block);
    this.#onChoose(first ? first.row.id : null);
  }

  #onKey(event) {
    const { columns, numShown } = this.#map;
    const at = this.#block ?? 0;
    const to = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + columns,
      ArrowUp: at - columns,
      Home: 0,
      End: numShown - 1,
    }[event.key];
    if (event.key === "Enter") this.#choose();
    else if (event.key === "Escape") this.#onChoose(null);
    else if (to === undefined) return;
    else {
      this.#isByKey = true;
      if (to >= 0 && to < numShown) this.#go(to);
    }
    event.preventDefault();
  }

  #go(block) {
    this.#block = block !== null && block >= 0 && block < this.#map.numShown ? block : null;
    this.#tip.hidden = this.#cursor.hidden = this.#block === null;
    if (this.#block === null) return;
    const { x, y, width, height } = this.#map.placeOf(this.#block);
    const left = x + this.#canvas.offsetLeft;
    const top = y + this.#canvas.offsetTop;
    Object.assign(this.#cursor.style, {
      transform: `translate(${left}px, ${top}px)`,
      width: `${width}px`,
      height: `${height}px`,
    });
    const lines = this.#describe(this.#block);
    if (this.#tip.textContent !== lines.join("")) {
      this.#tip.replaceChildren(
        ...lines.map((line, i) => Object.assign(document.createElement(i ? "span" : "b"), { textContent: line })),
      );
    }
    const box = this.#canvas.parentElement;
    const room = { width: box.clientWidth, height: box.clientHeight };
    const tipLeft = Math.max(0, Math.min(left, room.width - this.#tip.offsetWidth));
    const isBelow = top + height + 8 + this.#tip.offsetHeight < room.height;
    const tipTop = isBelow ? top + height + 8 : top - 8 - this.#tip.offsetHeight;
    this.#tip.style.transform = `translate(${tipLeft}px, ${Math.max(-8, tipTop)}px)`;
  }

  #describe(block) {
    const owners = this.#engine.owners[block];
    const head = `Block ${block.toLocaleString()}`;
    if (owners === FREE) return [`${head}: free`];
    if (owners === CACHED) return [`${head}: cached`, "Nobody holds it; its contents can be found until the space is needed."];
    const holders = this.#engine.holdersOf(block);
    const lines = holders.slice(0, 4).map(({ row, position }) => {
      const size = this.#engine.blockSize;
      const first = position * size;
      const computed = Math.max(0, Math.min(size, row.numComputed - first));
      const part = computed < size ? `, ${computed} of ${size} computed` : "";
      return `${nameOf(row)}: tokens ${first}–${first + size - 1}${part} (${phaseOf(row)})`;
    });
    if (owners > 4) lines.push(`and ${owners - 4} more`);
    return [owners > 1 ? `${head}: shared by ${owners}` : `${head}: in use`, ...lines];
  }
}
