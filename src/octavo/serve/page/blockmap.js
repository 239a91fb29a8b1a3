// The KV cache as a picture: one cell per block, in the order of their ids, drawn into a pixel buffer.
//
// A cell's look is a small number (its key); each key is drawn once, as a tile. Painting a block copies its
// tile, and only when its key changed; only bands of cells that changed go to the screen.

import { CACHED, FREE } from "./feed.js";

const HUES = 16;
const FLASH_LEVELS = 8;
const FILLS = 4;
const LARGEST_CELL = 26; // CSS pixels
const SMALLEST_CELL = 2; // device pixels
const FEW = 1024; // up to so many blocks are always shown
const SHAPED_FROM = 5; // device pixels from which on shapes tell states apart, not colours alone

/** Who wants no motion sees a flash come and go, not fade. */
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

const KIND = { free: 0, cached: 1, owned: 2, shared: 3 };
const FLASH = { none: 0, evicted: 1, preempted: 2 };

export class BlockMap {
  #canvas;
  #engine;
  #context;
  #image = null;
  #pixels = null;
  #keys = new Int32Array(0);
  #tiles = new Map();
  #cell = { width: 0, height: 0 }; // device pixels
  #columns = 1;
  #dirtyBands = new Uint8Array(0);
  #dirty = new Set();
  #isAllDirty = true;
  #flashes = new Map(); // block -> {kind, since}
  #selected = new Set(); // seq_ids
  #marked = null; // blocks of the selected rows
  #frame = 0;
  #colours = null;
  #isShowingAll = false;
  #numShown = 0;

  /** Draws `engine` (feed.js) on `canvas`, as wide as the canvas's parent. */
  constructor(canvas, engine) {
    this.#canvas = canvas;
    this.#engine = engine;
    this.#context = canvas.getContext("2d", { alpha: false });
    this.flashMs = 900;
    this.frameMs = []; // how long the last frames took to draw
    new ResizeObserver(() => this.refresh()).observe(canvas.parentElement);
  }

  /** The engine changed (see Engine.apply). */
  update({ isFull, touched, evicted, preempted }) {
    const now = performance.now();
    if (isFull) {
      this.#flashes.clear();
      this.refresh();
    }
    for (const block of touched) this.#dirty.add(block);
    for (const block of preempted) this.#flashes.set(block, { kind: FLASH.preempted, since: now });
    for (const block of evicted) this.#flashes.set(block, { kind: FLASH.evicted, since: now });
    if (this.#wanted() !== this.#numShown) this.refresh();
    if (this.#selected.size) this.#mark();
    this.#schedule();
  }

  /** Lay out and draw everything anew: another size, another theme. */
  refresh() {
    this.#isAllDirty = true;
    this.#schedule();
  }

  recolour() {
    this.#colours = null;
    this.refresh();
  }

  showAll(isOn) {
    this.#isShowingAll = isOn;
    this.refresh();
  }

  /** Let the blocks of these rows stand out; none: all alike. */
  select(seqIds) {
    this.#selected = new Set(seqIds);
    this.#mark();
    this.#schedule();
  }

  get numShown() {
    return this.#numShown;
  }

  /** Whether there are blocks that are not shown. */
  get isPartial() {
    return this.#wanted() < this.#engine.numBlocks;
  }

  get columns() {
    return this.#columns;
  }

  /** The block at a point of the canvas in CSS pixels, or null. */
  blockAt(x, y) {
    const { width, height } = this.#cell;
    const column = Math.floor((x * devicePixelRatio) / width);
    const block = Math.floor((y * devicePixelRatio) / height) * this.#columns + column;
    return column >= 0 && column < this.#columns && block >= 0 && block < this.#numShown ? block : null;
  }

  /** Where a block is on the canvas, in CSS pixels. */
  placeOf(block) {
    const width = this.#cell.width / devicePixelRatio;
    const height = this.#cell.height / devicePixelRatio;
    const x = (block % this.#columns) * width;
    const y = Math.floor(block / this.#columns) * height;
    return { x, y, width, height };
  }

  #schedule() {
    this.#frame ||= requestAnimationFrame((now) => this.#draw(now));
  }

  /** How many blocks to show. Low ids are used first, so a large cache that is hardly used shows its front. */
  #wanted() {
    const { numBlocks, highest } = this.#engine;
    if (this.#isShowingAll || numBlocks <= FEW) return numBlocks;
    let shown = FEW / 2;
    while (shown < highest + 1) shown *= 2;
    return Math.min(shown, numBlocks);
  }

  #draw(now) {
    this.#frame = 0;
    const began = performance.now();
    if (this.#isAllDirty) {
      if (!this.#layOut()) return;
      this.#isAllDirty = false;
      for (let block = 0; block < this.#numShown; block++) this.#paint(block, now);
    } else {
      for (const block of this.#dirty) this.#paint(block, now);
      for (const block of this.#flashes.keys()) this.#paint(block, now);
    }
    this.#dirty.clear();
    this.#show();
    this.frameMs.push(performance.now() - began);
    if (this.frameMs.length > 600) this.frameMs.shift();
    if (this.#flashes.size) this.#schedule();
  }

  #layOut() {
    const room = this.#canvas.parentElement.getBoundingClientRect();
    const width = Math.floor(room.width * devicePixelRatio);
    const height = Math.floor(room.height * devicePixelRatio);
    this.#numShown = this.#wanted();
    if (!width || !height || !this.#numShown) return false;
    const cell = largestCell(this.#numShown, width, height);
    const columns = Math.floor(width / cell.width);
    const bands = Math.ceil(this.#numShown / columns);
    this.#colours ??= readColours(this.#canvas);
    this.#tiles.clear();
    this.#cell = cell;
    this.#columns = columns;
    const canvas = this.#canvas;
    canvas.width = columns * cell.width;
    canvas.height = bands * cell.height;
    canvas.style.width = `${canvas.width / devicePixelRatio}px`;
    canvas.style.height = `${canvas.height / devicePixelRatio}px`;
    this.#image = this.#context.createImageData(canvas.width, canvas.height);
    this.#pixels = new Uint32Array(this.#image.data.buffer).fill(this.#colours.paper.pixel);
    this.#keys = new Int32Array(this.#numShown).fill(-1);
    this.#dirtyBands = new Uint8Array(bands).fill(1);
    return true;
  }

  #keyOf(block, now) {
    const engine = this.#engine;
    const owners = engine.owners[block];
    let kind = KIND.free;
    let hue = 0;
    let fill = FILLS;
    if (owners === CACHED) kind = KIND.cached;
    else if (owners > 1) kind = KIND.shared;
    else if (owners !== FREE) {
      kind = KIND.owned;
      hue = hueOf(engine.holder[block]);
      if (this.#cell.height >= SHAPED_FROM) fill = Math.floor(engine.fillOf(block) * FILLS);
    }
    let flash = FLASH.none;
    let level = 0;
    const flashing = this.#flashes.get(block);
    if (flashing) {
      level = Math.ceil((1 - (now - flashing.since) / this.flashMs) * FLASH_LEVELS);
      if (level > 0) {
        flash = flashing.kind;
        level = Math.min(STILL.matches ? FLASH_LEVELS : level, FLASH_LEVELS);
      } else {
        this.#flashes.delete(block);
        level = 0;
      }
    }
    const isDimmed = this.#marked && !this.#marked.has(block) ? 1 : 0;
    return ((((kind * HUES + hue) * (FILLS + 1) + fill) * 3 + flash) * (FLASH_LEVELS + 1) + level) * 2 + isDimmed;
  }

  #paint(block, now) {
    if (block >= this.#numShown) {
      this.#flashes.delete(block);
      return;
    }
    const key = this.#keyOf(block, now);
    if (key === this.#keys[block]) return;
    this.#keys[block] = key;
    let tile = this.#tiles.get(key);
    if (!tile) this.#tiles.set(key, (tile = this.#tile(key)));
    const cell = this.#cell;
    const width = this.#image.width;
    const pixels = this.#pixels;
    const band = Math.floor(block / this.#columns);
    let to = band * cell.height * width + (block % this.#columns) * cell.width;
    for (let y = 0, from = 0; y < cell.height; y++, to += width - cell.width) {
      for (let x = 0; x < cell.width; x++) pixels[to++] = tile[from++];
    }
    this.#dirtyBands[band] = 1;
  }

  #tile(key) {
    const isDimmed = key % 2;
    key = Math.floor(key / 2);
    const level = key % (FLASH_LEVELS + 1);
    key = Math.floor(key / (FLASH_LEVELS + 1));
    const flash = key % 3;
    key = Math.floor(key / 3);
    const fill = (key % (FILLS + 1)) / FILLS;
    key = Math.floor(key / (FILLS + 1));
    const hue = key % HUES;
    const kind = Math.floor(key / HUES);
    return drawTile(this.#cell, this.#colours, { kind, hue, fill, flash, level: level / FLASH_LEVELS, isDimmed });
  }

  #show() {
    const { width } = this.#image;
    const bands = this.#dirtyBands;
    for (let first = bands.indexOf(1); first >= 0; first = bands.indexOf(1, first)) {
      let end = first;
      while (bands[end]) bands[end++] = 0;
      const { height } = this.#cell;
      this.#context.putImageData(this.#image, 0, 0, 0, first * height, width, (end - first) * height);
      first = end;
    }
  }

  #mark() {
    const before = this.#marked;
    this.#marked = null;
    if (this.#selected.size) {
      this.#marked = new Set();
      for (const id of this.#selected) {
        for (const block of this.#engine.rows.get(id)?.blocks ?? []) this.#marked.add(block);
      }
    }
    if (Boolean(before) !== Boolean(this.#marked)) {
      for (let block = 0; block < this.#numShown; block++) this.#dirty.add(block);
    } else if (before) {
      for (const block of before) this.#dirty.add(block);
      for (const block of this.#marked) this.#dirty.add(block);
    }
  }
}

/** The CSS colour that a row's blocks have. */
export function colourOf(seqId) {
  return `var(--hue-${hueOf(seqId)})`;
}

function hueOf(seqId) {
  return seqId < 0 ? 0 : (seqId * 5) % HUES; // 5 and 16 have no common factor: neighbours differ clearly
}

/** The colours of the theme, each as [r, g, b] and as a pixel of an ImageData. */
function readColours(canvas) {
  const style = getComputedStyle(canvas);
  const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const read = (name) => {
    probe.fillStyle = style.getPropertyValue(name);
    probe.fillRect(0, 0, 1, 1);
    const { data } = probe.getImageData(0, 0, 1, 1);
    return { rgb: [...data.slice(0, 3)], pixel: new Uint32Array(data.buffer)[0] };
  };
  return {
    paper: read("--map-paper"),
    free: read("--map-free"),
    cached: read("--map-cached"),
    shared: read("--map-shared"),
    evicted: read("--map-evicted"),
    preempted: read("--map-preempted"),
    hues: Array.from({ length: HUES }, (_, i) => read(`--hue-${i}`)),
  };
}

/** The largest cell with which so many fit into the room, all in device pixels. Small ones need not be square:
 * from 3 to 2 is a large step. */
function largestCell(num, width, height) {
  for (let size = Math.round(LARGEST_CELL * devicePixelRatio); size > SMALLEST_CELL; size--) {
    for (const lower of size < SHAPED_FROM ? [size, size - 1] : [size]) {
      if (Math.floor(width / size) * Math.floor(height / lower) >= num) return { width: size, height: lower };
    }
  }
  return { width: SMALLEST_CELL, height: SMALLEST_CELL };
}

/** The pixels of one cell. Shapes: free a dot, cached a small square, owned a full one that fills up, shared a
 * full one with a hole. */
function drawTile({ width, height }, colours, { kind, hue, fill, flash, level, isDimmed }) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  const paper = colours.paper.rgb;
  const base = [colours.free, colours.cached, colours.hues[hue], colours.shared][kind].rgb;
  const glow = [base, colours.evicted.rgb, colours.preempted.rgb][flash];
  const colour = mix(mix(paper, base, isDimmed ? 0.22 : 1), glow, level);
  context.fillStyle = css(paper);
  context.fillRect(0, 0, width, height);
  const gap = height >= 9 ? Math.round(height / 9) : height >= 4 ? 1 : 0;
  const inner = height - gap;
  const square = (inset, style) => {
    context.fillStyle = style;
    context.beginPath();
    const side = inner - 2 * inset;
    context.roundRect(inset, inset, width - gap - 2 * inset, side, height >= 9 ? side * 0.22 : 0);
    context.fill();
  };
  if (height < SHAPED_FROM) square(0, css(kind === KIND.free && !flash ? mix(paper, colour, 0.4) : colour));
  else if (kind === KIND.free && !flash) square(Math.floor(inner * 0.36), css(colour));
  else if (kind === KIND.cached && !flash) square(Math.max(1, Math.floor(inner * 0.2)), css(colour));
  else if (kind === KIND.owned && fill < 1 && !flash) {
    square(0, css(mix(paper, colour, 0.3)));
    context.save();
    context.beginPath();
    context.rect(0, inner * (1 - fill), width, height);
    context.clip();
    square(0, css(colour));
    context.restore();
  } else {
    square(0, css(colour));
    if (kind === KIND.shared) square(Math.round(inner * 0.34), css(paper));
  }
  return new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
}

function mix(a, b, share) {
  return a.map((value, i) => Math.round(value + (b[i] - value) * share));
}

function css([r, g, b]) {
  return `rgb(${r} ${g} ${b})`;
}
