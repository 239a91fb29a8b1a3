// The table of requests: only the lines in sight exist as elements, so a thousand cost as much as twenty.

import { colourOf } from "./blockmap.js";

const LINE = 30; // CSS pixels; style.css says the same

export class RowsTable {
  #scroller;
  #body;
  #engine;
  #onSelect;
  #lines = [];
  #ids = [];
  #selected = null;

  /** Fills `scroller` (a grid) and calls `onSelect(seqId | null)` when a row is chosen or let go. */
  constructor(scroller, engine, onSelect) {
    this.#scroller = scroller;
    this.#engine = engine;
    this.#onSelect = onSelect;
    this.#body = scroller.querySelector(".lines");
    scroller.addEventListener("scroll", () => this.update(), { passive: true });
    scroller.addEventListener("keydown", (event) => this.#onKey(event));
    this.#body.addEventListener("click", (event) => {
      const line = event.target.closest("[data-row]");
      if (line) this.choose(Number(line.dataset.row), { isToggle: true });
    });
    new ResizeObserver(() => this.update()).observe(scroller);
  }

  get selected() {
    return this.#selected;
  }

  /** Select a row (null: none) and say so; with `isToggle`, selecting it again lets it go. */
  choose(seqId, { isToggle = false } = {}) {
    this.#selected = isToggle && this.#selected === seqId ? null : seqId;
    if (this.#selected !== null) this.#bringIntoSight(this.#ids.indexOf(this.#selected));
    this.#onSelect(this.#selected);
    this.update();
  }

  update() {
    const { rows } = this.#engine;
    this.#ids = [...rows.keys()];
    if (this.#selected !== null && !rows.has(this.#selected)) this.choose(null);
    this.#body.style.height = `${this.#ids.length * LINE}px`;
    this.#scroller.setAttribute("aria-rowcount", this.#ids.length + 1);
    const first = Math.max(0, Math.floor(this.#scroller.scrollTop / LINE) - 2);
    const num = Math.min(this.#ids.length - first, Math.ceil(this.#scroller.clientHeight / LINE) + 4);
    while (this.#lines.length < num) this.#addLine();
    this.#lines.forEach((line, i) => {
      line.element.hidden = i >= num;
      if (i < num) this.#fill(line, rows.get(this.#ids[first + i]), first + i);
    });
    const active = this.#lines.find((line) => !line.element.hidden && line.id === this.#selected);
    if (active) this.#scroller.setAttribute("aria-activedescendant", active.element.id);
    else this.#scroller.removeAttribute("aria-activedescendant");
  }

  #addLine() {
    const element = document.createElement("div");
    element.className = "line";
    element.id = `row-line-${this.#lines.length}`;
    element.setAttribute("role", "row");
    const cells = ["request", "phase", "prompt", "output", "cached", "blocks"].map((name) => {
      const cell = document.createElement("span");
      cell.className = name;
      cell.setAttribute("role", "gridcell");
      element.append(cell);
      return cell;
    });
    const chip = document.createElement("i");
    const name = document.createElement("span");
    cells[0].append(chip, name);
    this.#body.append(element);
    this.#lines.push({ element, chip, name, cells, id: null });
  }

  #fill(line, row, place) {
    const { element, chip, name, cells } = line;
    const numOutput = Math.max(0, row.numTokens - row.numPrompt);
    line.id = row.id;
    element.dataset.row = row.id;
    element.style.transform = `translateY(${place * LINE}px)`;
    element.setAttribute("aria-rowindex", place + 2);
    element.setAttribute("aria-selected", row.id === this.#selected);
    chip.style.background = row.isRunning ? colourOf(row.id) : "";
    const texts = [phaseOf(row), row.numPrompt, numOutput, row.numCached, row.blocks.length];
    setText(name, nameOf(row));
    element.title = row.requestId;
    texts.forEach((text, i) => setText(cells[i + 1], typeof text === "number" ? text.toLocaleString() : text));
  }

  #onKey(event) {
    const at = this.#ids.indexOf(this.#selected);
    const page = Math.max(1, Math.floor(this.#scroller.clientHeight / LINE) - 1);
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at < 0 ? this.#ids.length - 1 : at - 1,
      PageDown: Math.min(at + page, this.#ids.length - 1),
      PageUp: Math.max(at - page, 0),
      Home: 0,
      End: this.#ids.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < this.#ids.length) this.choose(this.#ids[to]);
  }

  #bringIntoSight(place) {
    const top = place * LINE;
    const { scrollTop, clientHeight } = this.#scroller;
    const head = LINE; // the heading sticks to the top
    if (top < scrollTop) this.#scroller.scrollTop = top;
    else if (top + LINE + head > scrollTop + clientHeight) {
      this.#scroller.scrollTop = top + LINE + head - clientHeight;
    }
  }
}

/** A row's name for people: what ids begin with says little. */
export function nameOf(row) {
  const name = row.isOwn ? "this chat" : row.requestId.replace(/^(chatcmpl|cmpl|resp)[-_]/, "");
  return row.index ? `${name} · ${row.index}` : name;
}

/** What a row is doing, in a word. */
export function phaseOf(row) {
  if (!row.isRunning) return "waiting";
  if (row.numComputed < row.numTokens - 1) {
    return `prefill ${Math.floor((100 * row.numComputed) / Math.max(1, row.numTokens))} %`;
  }
  return "decode";
}

function setText(element, text) {
  text = String(text);
  if (element.textContent !== text) element.textContent = text;
}
