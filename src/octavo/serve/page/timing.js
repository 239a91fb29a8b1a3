// How long an answer took, and what is said of it in a line.

import { element } from "./elements.js";

/** When tokens came, as the reader saw them, and what the server says it used. */
export class Timing {
  #began = performance.now();
  #first = null;
  #last = null;
  #numPieces = 0;
  #usage = null;

  token() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#numPieces += 1;
  }

  use(usage) {
    this.#usage = usage;
  }

  /** The figures so far, plain and storable. */
  end() {
    const num = this.#usage?.completion_tokens ?? this.#numPieces;
    const seconds = (this.#last - this.#first) / 1000;
    return {
      ttftMs: this.#first === null ? null : this.#first - this.#began,
      numTokens: num,
      rate: seconds > 0 && num > 1 ? (num - 1) / seconds : null,
      numPrompt: this.#usage?.prompt_tokens ?? null,
      numCached: this.#usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}

/** What to tell of an assistant's message, as elements. */
export function facts(message, isRunning) {
  const stats = message.stats instanceof Timing ? message.stats.end() : message.stats;
  if (!stats) return [];
  const parts = [];
  const add = (text, title) => {
    const part = element("span", "fact", text);
    part.title = title;
    parts.push(part);
  };
  if (stats.ttftMs !== null) {
    const seconds = stats.ttftMs / 1000;
    add(seconds < 1 ? `${Math.round(stats.ttftMs)} ms` : `${seconds.toFixed(1)} s`, "Time to the first token");
  } else if (isRunning) add("waiting for the first token", "Queued, or its prompt is being computed");
  if (stats.rate) add(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`, "Tokens a second after the first");
  if (stats.numTokens) add(`${stats.numTokens.toLocaleString()} tokens`, "Tokens of the answer");
  if (stats.numCached !== null) {
    add(`${stats.numCached} of ${stats.numPrompt} cached`, "Prompt tokens that the prefix cache supplied");
  }
  const ends = { length: "ended at the limit", stopped: "stopped" };
  if (ends[message.finish]) add(ends[message.finish], "Why it ended");
  return parts;
}
