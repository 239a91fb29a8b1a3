// Small charts: a line of the last minute, and the time of each of the last steps.

/** Fit a canvas to its box. Returns its context, scaled so that one unit is a CSS pixel, and the box. */
function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function colour(canvas, name) {
  return getComputedStyle(canvas).getPropertyValue(name);
}

/** The last values of one gauge as a line over a soft area; `top` fixes the scale. */
export class Sparkline {
  #values = [];

  constructor(canvas, { length = 120, top = null } = {}) {
    this.canvas = canvas;
    this.length = length;
    this.top = top;
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > this.length) this.#values.shift();
    this.draw();
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    if (this.#values.length < 2 || !width) return;
    const top = this.top ?? Math.max(1e-9, ...this.#values) * 1.1;
    const step = width / (this.length - 1);
    const start = width - step * (this.#values.length - 1);
    const line = new Path2D();
    this.#values.forEach((value, i) => {
      const y = height - 1.5 - (height - 3) * Math.min(1, value / top);
      if (i) line.lineTo(start + step * i, y);
      else line.moveTo(start, y);
    });
    const area = new Path2D(line);
    area.lineTo(width, height);
    area.lineTo(start, height);
    context.fillStyle = colour(this.canvas, "--spark-area");
    context.fill(area);
    context.strokeStyle = colour(this.canvas, "--spark-line");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke(line);
  }
}

const BAR = 3;
const GAP = 1;

/** One bar per step: as high as the step took time, split by its prompt and its other tokens. */
export class Timeline {
  #steps = []; // [microseconds, prompt tokens, other tokens]
  #top = 1;

  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  push(steps) {
    if (!steps.length) return;
    this.#steps.push(...steps);
    this.#steps.splice(0, this.#steps.length - 1000);
    this.draw();
  }

  clear() {
    this.#steps = [];
    this.draw();
  }

  get last() {
    return this.#steps.at(-1) ?? null;
  }

  /** The step drawn at `x` CSS pixels from the left, or null. */
  stepAt(x) {
    const { width } = this.canvas.getBoundingClientRect();
    const fromEnd = Math.floor((width - x) / (BAR + GAP));
    return this.#steps.at(-1 - fromEnd) ?? null;
  }

  /** Milliseconds that the full height stands for. */
  get topMs() {
    return this.#top / 1000;
  }

  draw() {
    const { context, width: box, height } = prepare(this.canvas);
    const width = Math.floor(box);
    const shown = this.#steps.slice(-Math.floor(width / (BAR + GAP)));
    if (!shown.length) return;
    this.#top = niceAbove(Math.max(...shown.map(([us]) => us)));
    const colours = { prompt: colour(this.canvas, "--prefill"), other: colour(this.canvas, "--decode") };
    context.fillStyle = colour(this.canvas, "--line");
    context.fillRect(0, Math.round(height / 2), width, 1);
    shown.forEach(([us, prompt, other], i) => {
      const x = width - (shown.length - i) * (BAR + GAP);
      const tall = Math.max(1, (us / this.#top) * (height - 2));
      const share = prompt / Math.max(1, prompt + other);
      context.fillStyle = colours.other;
      context.fillRect(x, height - tall * (1 - share), BAR, tall * (1 - share));
      context.fillStyle = colours.prompt;
      context.fillRect(x, height - tall, BAR, tall * share);
    });
  }
}

/** The smallest of 1, 2, 5, 10, ... times a power of ten that is at least `value`. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value);
}
