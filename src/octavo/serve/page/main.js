// Joins the parts: the stream of the engine's news, the chat, the map, the table.

import { events, onKeyNeeded } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Timeline } from "./charts.js";
import { Chat } from "./chat.js";
import { Engine, LostPayload } from "./feed.js";
import { Gauges } from "./gauges.js";
import { Inspector } from "./inspector.js";
import { RowsTable } from "./rows.js";
import { askForKey, followTheme, Settings } from "./settings.js";

const SUGGESTIONS = [
  "Tell me a long story about a lighthouse.",
  "Explain a KV cache to a librarian.",
  "Write a haiku about paper.",
];

const STATES = {
  connecting: "connecting",
  loading: "loading the model",
  ready: "ready",
  draining: "shutting down",
  stuck: "not responding",
  dead: "engine ended",
  lost: "no connection",
  locked: "API key needed",
};

const NOTICES = {
  loading: "The model is being loaded. Questions can be asked in a moment.",
  draining: "The server is shutting down: it finishes what runs and takes nothing new.",
  stuck: "The engine has work, but no step ends. What runs may fail.",
  dead: "The engine has ended, so nothing can be answered. Restart the server.",
  lost: "No connection to the server. Trying again.",
  locked: "This server wants an API key. Click anywhere to give one.",
};

const RETRY_MS = [250, 500, 1000, 2000, 4000];

const $ = (id) => document.getElementById(id);

const engine = new Engine();
const map = new BlockMap($("map"), engine);
const timeline = new Timeline($("timeline"));
const gauges = new Gauges(engine);
const settings = new Settings($("settings"), $("open-settings"), $("settings-note"));
const table = new RowsTable($("rows"), engine, (id) => map.select(id === null ? [] : [id]));
const inspector = new Inspector({
  map,
  engine,
  canvas: $("map"),
  tip: $("map-tip"),
  cursor: $("map-cursor"),
  onChoose: (id) => table.choose(id),
});
const chat = new Chat({
  elements: {
    messages: $("messages"),
    scroller: $("messages-scroller"),
    welcome: $("welcome"),
    form: $("composer"),
    prompt: $("prompt"),
    send: $("send"),
    stop: $("stop"),
    editing: $("editing"),
    cancelEdit: $("cancel-edit"),
    announcer: $("announcer"),
  },
  settings: (messages) => ({ model: modelName, ...settings.toRequest(messages) }),
  rowOf: (requestId) => {
    for (const row of engine.rows.values()) if (row.requestId === requestId) return row;
    return null;
  },
  onShowRow: (row) => {
    showTab("engine");
    table.choose(row.id);
  },
});

let modelName = null;

function onStatus({ state, model, version, reason }) {
  modelName = model?.name ?? modelName;
  $("model-name").textContent = modelName ?? "";
  $("model-name").title = model ? `${model.device}, ${model.dtype}, KV ${model.kv_cache_dtype}; Octavo ${version}` : "";
  setState(state, reason);
}

function setState(state, reason = "") {
  $("state").dataset.state = document.body.dataset.state = state;
  const text = $("state").querySelector("span");
  if (text.textContent !== STATES[state]) text.textContent = STATES[state];
  $("notice").hidden = !NOTICES[state];
  $("notice").textContent = [NOTICES[state], reason && `Reason: ${reason}`].filter(Boolean).join(" ");
  $("map-empty").hidden = engine.numBlocks > 0;
}

function onPayload(message, isFirst) {
  const changes = engine.apply(message);
  if (changes.isFull) onFull();
  if (isFirst) {
    // What was drawn before may be another engine's, and what came since was missed.
    gauges.clear();
    timeline.clear();
  }
  map.update(changes);
  timeline.push(changes.steps);
  table.update();
  inspector.refresh();
  chat.refreshRow();
  showCounts();
}

function onFull() {
  const { num_blocks: numBlocks, block_size: size } = engine.facts;
  $("map-facts").textContent = `${numBlocks.toLocaleString()} blocks of ${size} tokens`;
  $("map-empty").hidden = true;
}

function showCounts() {
  const { stats, owners } = engine;
  let numShared = 0;
  for (const count of owners) if (count > 1) numShared += 1;
  const counts = {
    "num-free": stats.num_free_blocks,
    "num-cached": stats.num_cached_blocks,
    "num-owned": stats.num_owned_blocks - numShared,
    "num-shared": numShared,
    "num-evicted": stats.num_evictions,
    "num-preempted": stats.num_preemptions,
  };
  for (const [id, count] of Object.entries(counts)) $(id).textContent = count.toLocaleString();
  const numUnseen = stats.num_running + stats.num_waiting - engine.rows.size;
  $("rows-facts").textContent = numUnseen > 0 ? `and ${numUnseen.toLocaleString()} more waiting` : "";
  $("rows-empty").hidden = engine.rows.size > 0;
  $("show-all").hidden = !map.isPartial && $("show-all").ariaPressed !== "true";
  if (!isOverTimeline) tellStep(timeline.last);
}

let isOverTimeline = false;

function tellStep(step) {
  $("step-facts").textContent = step
    ? `${(step[0] / 1000).toFixed(1)} ms: ${step[1]} prefill, ${step[2]} decode · scale ${timeline.topMs} ms`
    : "";
}

$("timeline").addEventListener("pointermove", (event) => {
  isOverTimeline = true;
  tellStep(timeline.stepAt(event.offsetX));
});
$("timeline").addEventListener("pointerleave", () => {
  isOverTimeline = false;
  tellStep(timeline.last);
});

// The stream of news

let listening = null; // ends the stream when aborted

async function listen() {
  for (let attempt = 0; ; attempt++) {
    if (document.hidden) await happening("visibilitychange");
    listening = new AbortController();
    let isFirst = true;
    try {
      for await (const { event, data } of events("v1/engine/events", { signal: listening.signal })) {
        if (event === "status") onStatus(JSON.parse(data));
        else {
          attempt = 0;
          onPayload(JSON.parse(data), isFirst);
          isFirst = false;
        }
      }
      if (!["dead", "draining"].includes($("state").dataset.state)) setState("lost");
    } catch (error) {
      if (error.status === 401) {
        setState("locked");
        await happening("click");
        continue;
      }
      if (!(error instanceof LostPayload) && error.name !== "AbortError") setState("lost");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
  }
}

function happening(name) {
  return new Promise((resolve) => addEventListener(name, resolve, { once: true }));
}

// Nobody sees a hidden page, so the engine need not tell it anything.
document.addEventListener("visibilitychange", () => document.hidden && listening?.abort());

// The rest of the page

function showTab(name) {
  document.body.dataset.tab = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isSelected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", isSelected);
    tab.tabIndex = isSelected ? 0 : -1;
  }
  map.refresh();
  table.update();
}

for (const name of ["chat", "engine"]) $(`tab-${name}`).addEventListener("click", () => showTab(name));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = document.body.dataset.tab === "chat" ? "engine" : "chat";
  showTab(other);
  $(`tab-${other}`).focus();
});

$("show-all").addEventListener("click", () => {
  const isOn = $("show-all").ariaPressed !== "true";
  $("show-all").ariaPressed = String(isOn);
  $("show-all").textContent = isOn ? "Show what is used" : "Show all";
  map.showAll(isOn);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !chat.isAnswering && table.selected !== null) table.choose(null);
});
$("new-chat").addEventListener("click", () => chat.clear());
for (const text of SUGGESTIONS) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => chat.ask(text));
  const item = document.createElement("li");
  item.append(button);
  $("suggestions").append(item);
}

followTheme($("theme"), () => {
  map.recolour();
  gauges.redraw();
  timeline.draw();
});
onKeyNeeded((wasRefused) => askForKey($("key"), wasRefused));
listen();

/** For a console or a test that wants to look inside. */
export { chat, engine, map, table, timeline };
