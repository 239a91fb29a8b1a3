// The numbers above the map. Payloads come ten times a second and not at all when nothing happens, so the
// gauges look at the clock themselves, twice a second: calm to read, and back to zero when all is still.

import { Sparkline } from "./charts.js";

const TICK_MS = 500;
const RATE_TICKS = 4; // rates over two seconds
const HIT_TICKS = 120; // hits over a minute

export class Gauges {
  #engine;
  #ticks = [];
  #sparks;

  constructor(engine) {
    this.#engine = engine;
    const spark = (id, options) => new Sparkline(document.getElementById(id), options);
    this.#sparks = {
      out: spark("out-spark"),
      in: spark("in-spark"),
      running: spark("running-spark"),
      hit: spark("hit-spark", { top: 1 }),
      kv: spark("kv-spark", { top: 1 }),
    };
    setInterval(() => this.#tick(), TICK_MS);
  }

  /** Start anew: another connection may be another engine. */
  clear() {
    this.#ticks = [];
  }

  redraw() {
    for (const spark of Object.values(this.#sparks)) spark.draw();
  }

  #tick() {
    const { stats, numBlocks } = this.#engine;
    if (!stats || document.hidden) return;
    const now = { s: performance.now() / 1000, ...stats };
    this.#ticks.push(now);
    if (this.#ticks.length > HIT_TICKS + 1) this.#ticks.shift();
    const rate = (name) => {
      const before = this.#ticks.at(-1 - RATE_TICKS) ?? this.#ticks[0];
      return now.s > before.s ? (now[name] - before[name]) / (now.s - before.s) : 0;
    };
    const before = this.#ticks[0];
    const hit = now.num_hit_tokens - before.num_hit_tokens;
    const asked = hit + now.num_prompt_tokens - before.num_prompt_tokens;
    const hitRate = asked ? hit / asked : null;
    const used = stats.num_owned_blocks / numBlocks;
    this.#show("out-rate", rate("num_output_tokens"), this.#sparks.out);
    this.#show("in-rate", rate("num_prompt_tokens"), this.#sparks.in);
    this.#show("running", stats.num_running, this.#sparks.running);
    set("waiting", stats.num_waiting ? `+ ${stats.num_waiting.toLocaleString()} waiting` : "");
    set("hit-rate", hitRate === null ? "–" : Math.round(100 * hitRate));
    this.#sparks.hit.push(hitRate ?? 0);
    set("kv-use", used > 0 && used < 0.1 ? (100 * used).toFixed(1) : Math.round(100 * used));
    this.#sparks.kv.push(used);
  }

  #show(id, value, spark) {
    set(id, value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString());
    spark.push(value);
  }
}

function set(id, text) {
  document.getElementById(id).textContent = text;
}
