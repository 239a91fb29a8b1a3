// What the engine holds, kept up to date from its payloads (their fields: octavo/serve/observer.py).

export const FREE = 0;
export const CACHED = -1;

/** A payload was lost; only a new connection, which begins with everything, can help. */
export class LostPayload extends Error {}

export class Engine {
  constructor() {
    this.numBlocks = 0;
    this.blockSize = 16;
    this.facts = null; // the `full` part of the last full payload
    this.stats = null;
    this.timeS = 0;
    this.rows = new Map(); // seq_id -> row, in order of arrival
    this.owners = new Int16Array(0); // per block: how many rows hold it, FREE or CACHED
    this.holder = new Int32Array(0); // per block: one of its rows by seq_id, or -1
    this.position = new Int32Array(0); // per block: where it stands in that row's table
    this.highest = -1; // the highest block id ever in use
    this.seq = null;
  }

  /**
   * Take a payload in. Returns what it changed: `touched` blocks (a Set; null = all), `evicted` and
   * `preempted` block ids, `steps` as [microseconds, prompt tokens, other tokens], `isFull`.
   */
  apply(message) {
    const isFull = Boolean(message.full);
    if (isFull) this.#begin(message.full);
    else if (this.seq === null || message.seq !== this.seq + 1) throw new LostPayload();
    this.seq = message.seq;
    this.stats = message.stats;
    this.timeS = message.time_s;

    const touched = new Set();
    const orphans = new Set();
    const preempted = message.preempted.flatMap((id) => this.rows.get(id)?.blocks ?? []);
    for (const [id, start, blocks] of message.tables) {
      if (this.rows.has(id)) this.#cut(this.rows.get(id), start, touched, orphans);
    }
    for (const id of message.gone) {
      this.#cut(this.rows.get(id), 0, touched, orphans);
      this.rows.delete(id);
    }
    for (const [id, requestId, index, numPrompt, maxTotal] of message.new) {
      this.rows.set(id, {
        id, requestId, index, numPrompt, maxTotal,
        numTokens: numPrompt, numComputed: 0, numCached: 0, isRunning: false, blocks: [],
      });
    }
    for (let i = 0; i < message.blocks.length; i += 2) {
      const block = message.blocks[i];
      this.owners[block] = message.blocks[i + 1];
      if (block > this.highest) this.highest = block;
      touched.add(block);
    }
    for (const [id, start, blocks] of message.tables) {
      const row = this.rows.get(id);
      blocks.forEach((block, i) => {
        row.blocks.push(block);
        if (this.holder[block] < 0) this.#give(block, id, start + i);
        touched.add(block);
      });
    }
    for (let i = 0; i < message.rows.length; i += 5) this.#update(message.rows, i, touched);
    this.#adopt(orphans);
    return { isFull, touched, evicted: message.evicted ?? [], preempted, steps: groups(message.steps, 3) };
  }

  /** Every row that holds the block, with the block's place in its table. */
  holdersOf(block) {
    const found = [];
    for (const row of this.rows.values()) {
      const position = row.blocks.indexOf(block);
      if (position >= 0) found.push({ row, position });
    }
    return found;
  }

  /** How much of the block is computed, from 0 to 1; a block with several holders counts as full. */
  fillOf(block) {
    if (this.owners[block] !== 1) return 1;
    const row = this.rows.get(this.holder[block]);
    if (!row) return 1;
    const tokens = row.numComputed - this.position[block] * this.blockSize;
    return Math.max(0, Math.min(1, tokens / this.blockSize));
  }

  #begin(facts) {
    this.facts = facts;
    this.numBlocks = facts.num_blocks;
    this.blockSize = facts.block_size;
    this.owners = new Int16Array(this.numBlocks);
    this.holder = new Int32Array(this.numBlocks).fill(-1);
    this.position = new Int32Array(this.numBlocks);
    this.rows.clear();
    this.highest = -1;
  }

  #give(block, id, position) {
    this.holder[block] = id;
    this.position[block] = position;
  }

  #cut(row, length, touched, orphans) {
    for (const block of row.blocks.splice(length)) {
      touched.add(block);
      if (this.holder[block] === row.id) {
        this.holder[block] = -1;
        orphans.add(block);
      }
    }
  }

  #update(rows, i, touched) {
    const row = this.rows.get(rows[i]);
    const before = row.numComputed;
    row.numTokens = rows[i + 1];
    row.numComputed = rows[i + 2];
    row.numCached = rows[i + 3];
    row.isRunning = rows[i + 4] === 1;
    const first = Math.floor(Math.min(before, row.numComputed) / this.blockSize);
    const last = Math.ceil(row.numComputed / this.blockSize);
    for (let place = first; place < last && place < row.blocks.length; place++) touched.add(row.blocks[place]);
  }

  /** Blocks that lost the row we knew them by, but not their last one, are given to another of theirs. */
  #adopt(orphans) {
    for (const block of orphans) {
      if (this.owners[block] <= 0 || this.holder[block] >= 0) orphans.delete(block);
    }
    if (!orphans.size) return;
    for (const row of this.rows.values()) {
      row.blocks.forEach((block, position) => {
        if (orphans.delete(block)) this.#give(block, row.id, position);
      });
    }
  }
}

export function groups(numbers, size) {
  const found = [];
  for (let i = 0; i < numbers.length; i += size) found.push(numbers.slice(i, i + size));
  return found;
}
