// The conversation: what was said, what is being answered, and how long it took.

import { events, ServerError } from "./api.js";
import { colourOf } from "./blockmap.js";
import { action, copy, element, lastLine, relabel, renew } from "./elements.js";
import { render } from "./markdown.js";
import { facts, Timing } from "./timing.js";

const STORE = "octavo.chat";
const RENDER_MS = 50; // an answer that grows is laid out anew at most this often,
const RENDER_SHARE = 4; // and a long one no more often than leaves most of the time to other things

export class Chat {
  #messages = load();
  #articles = [];
  #elements;
  #settings;
  #rowOf;
  #onShowRow;
  #running = null; // {controller, message, article, requestId} of the answer that is being written
  #editing = null; // index of the message that the next one replaces

  /**
   * elements: messages, scroller, welcome, form, prompt, send, stop, editing, cancelEdit, announcer.
   * settings(): what to ask the model with. rowOf(requestId): the engine's row of a request, or null.
   * onShowRow(row): somebody wants to see its blocks.
   */
  constructor({ elements, settings, rowOf, onShowRow }) {
    this.#elements = elements;
    this.#settings = settings;
    this.#rowOf = rowOf;
    this.#onShowRow = onShowRow;
    const { form, prompt, stop, cancelEdit, messages } = elements;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    prompt.addEventListener("input", () => this.#fit());
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.#running) this.stop();
      else if (this.#editing !== null) this.#edit(null);
    });
    stop.addEventListener("click", () => this.stop());
    cancelEdit.addEventListener("click", () => this.#edit(null));
    messages.addEventListener("click", (event) => this.#onClick(event));
    this.#rebuild();
  }

  get isAnswering() {
    return this.#running !== null;
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.#edit(null);
    this.#rebuild();
    this.#elements.prompt.focus();
  }

  /** Stop the answer; what there is of it stays. */
  stop() {
    this.#running?.controller.abort();
  }

  /** Ask, as if it had been typed. */
  ask(text) {
    if (this.#running || !text.trim()) return;
    if (this.#editing !== null) this.#messages.length = this.#editing;
    this.#editing = null;
    this.#elements.editing.hidden = true;
    this.#messages.push({ role: "user", content: text.trim() });
    this.#rebuild();
    this.#answer();
  }

  /** The running answer's blocks may have changed. */
  refreshRow() {
    if (this.#running) this.#fillFooter(this.#running.article, this.#running.message);
  }

  #submit() {
    const { prompt } = this.#elements;
    if (this.#running || !prompt.value.trim()) return;
    const text = prompt.value;
    prompt.value = "";
    this.#fit();
    this.ask(text);
  }

  async #answer() {
    const message = { role: "assistant", content: "", reasoning: "" };
    const history = this.#messages.slice();
    this.#messages.push(message);
    const article = this.#addArticle(message, this.#messages.length - 1);
    const controller = new AbortController();
    const running = { controller, message, article, requestId: null };
    this.#running = running;
    this.#setAnswering(true);
    const timing = new Timing();
    message.stats = timing;
    let nextRender = 0;
    let pending = null;
    const show = () => {
      pending = null;
      const began = performance.now();
      this.#fillBody(article, message);
      this.#fillFooter(article, message);
      const now = performance.now();
      nextRender = now + Math.max(RENDER_MS, RENDER_SHARE * (now - began));
    };
    let isWhole = false;
    try {
      const body = { ...this.#settings(history), stream: true, stream_options: { include_usage: true } };
      for await (const { data } of events("v1/chat/completions", { body, signal: controller.signal })) {
        if (data === "[DONE]") {
          isWhole = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.code, chunk.error.message);
        running.requestId ??= chunk.id;
        if (chunk.usage) timing.use(chunk.usage);
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const { content, reasoning_content: reasoning } = choice.delta;
        if (content || reasoning) timing.token();
        message.content += content ?? "";
        message.reasoning += reasoning ?? "";
        if (choice.finish_reason) message.finish = choice.finish_reason;
        pending ??= setTimeout(show, Math.max(0, nextRender - performance.now()));
      }
      if (!isWhole) throw new ServerError(0, "The answer broke off.");
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = describe(error);
    } finally {
      clearTimeout(pending);
      message.stats = timing.end();
      this.#running = null;
      show();
      this.#setAnswering(false);
      this.#announce(message.error ?? (message.content || "Stopped."));
      this.#rebuildButtons();
      save(this.#messages);
    }
  }

  #onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("copy-code")) {
      copy(button, button.parentElement.querySelector("pre").textContent);
      return;
    }
    const article = button.closest("article");
    const index = this.#articles.indexOf(article);
    const message = this.#messages[index];
    const action = button.dataset.action;
    if (action === "copy") copy(button, message.content);
    else if (action === "edit") this.#edit(index);
    else if (action === "again" && !this.#running) {
      this.#messages.length = message.role === "user" ? index + 1 : index;
      this.#rebuild();
      this.#answer();
    } else if (action === "row") {
      const row = this.#rowOf(this.#running?.requestId);
      if (row) this.#onShowRow(row);
    }
  }

  #edit(index) {
    const { prompt, editing } = this.#elements;
    if (index !== null && this.#running) return;
    if (this.#editing !== null && index === null) prompt.value = "";
    this.#editing = index;
    editing.hidden = index === null;
    if (index !== null) {
      prompt.value = this.#messages[index].content;
      prompt.focus();
    }
    this.#fit();
  }

  #rebuild() {
    this.#elements.messages.replaceChildren();
    this.#articles = [];
    this.#messages.forEach((message, i) => this.#addArticle(message, i));
    this.#elements.welcome.hidden = this.#messages.length > 0;
    save(this.#messages);
  }

  #addArticle(message, index) {
    const article = element("article", `message ${message.role}`);
    article.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    article.append(element("div", "body"), element("footer"));
    this.#articles[index] = article;
    this.#elements.messages.append(article);
    this.#fillBody(article, message);
    this.#fillFooter(article, message);
    this.#follow();
    return article;
  }

  #fillBody(article, message) {
    const body = article.querySelector(".body");
    if (message.role === "user") {
      body.textContent = message.content;
      return;
    }
    const isRunning = this.#running?.message === message;
    const fragment = document.createDocumentFragment();
    if (message.reasoning) {
      const details = element("details", "reasoning");
      details.open = article.querySelector("details")?.open ?? false;
      details.append(element("summary", "", isRunning && !message.content ? "Thinking…" : "Thoughts"));
      details.append(element("div", "", message.reasoning));
      fragment.append(details);
    }
    const text = element("div", "text");
    text.append(render(message.content));
    fragment.append(text);
    if (isRunning) lastLine(text).append(element("span", "caret"));
    if (message.error) fragment.append(element("p", "error", message.error));
    const isAtEnd = this.#isAtEnd();
    renew(body, fragment);
    if (isAtEnd) this.#follow();
  }

  #fillFooter(article, message) {
    const footer = article.querySelector("footer");
    const isRunning = this.#running?.message === message;
    const parts = [];
    if (message.role === "assistant") {
      const row = isRunning ? this.#rowOf(this.#running.requestId) : null;
      if (row) row.isOwn = true;
      if (row?.blocks.length) {
        const button = action("row", `${row.blocks.length} blocks`, "Show its blocks in the map");
        const chip = element("i");
        chip.style.background = colourOf(row.id);
        button.prepend(chip);
        parts.push(button);
      }
      parts.push(...facts(message, isRunning));
    }
    if (!isRunning) {
      parts.push(element("span", "spacer"));
      if (message.role === "user") parts.push(action("edit", "Edit", "Edit and ask again"));
      if (message.content) parts.push(action("copy", "Copy", "Copy the text"));
      if (message === this.#messages.at(-1) && !this.#running) {
        const isAnswered = message.role === "assistant" && !message.error;
        parts.push(action("again", isAnswered ? "Regenerate" : "Try again", "Answer anew"));
      }
    }
    relabel(footer, parts);
  }

  #rebuildButtons() {
    this.#messages.forEach((message, i) => this.#fillFooter(this.#articles[i], message));
  }

  #setAnswering(isOn) {
    const { send, stop, prompt, messages } = this.#elements;
    const hadFocus = document.activeElement === (isOn ? send : stop);
    send.hidden = isOn;
    stop.hidden = !isOn;
    messages.setAttribute("aria-busy", isOn);
    if (isOn) this.#announce("Answering.");
    if (hadFocus) (isOn ? stop : prompt).focus();
  }

  #announce(text) {
    this.#elements.announcer.textContent = text;
  }

  #isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.#elements.scroller;
    return scrollTop + clientHeight > scrollHeight - 48;
  }

  #follow() {
    const { scroller } = this.#elements;
    scroller.scrollTop = scroller.scrollHeight;
  }

  #fit() {
    const { prompt } = this.#elements;
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
  }
}

function describe(error) {
  if (error instanceof ServerError) {
    const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
    return `${error.message}${wait}`;
  }
  return "The connection to the server was lost.";
}

function load() {
  try {
    const messages = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(messages) ? messages : [];
  } catch {
    return [];
  }
}

function save(messages) {
  try {
    localStorage.setItem(STORE, JSON.stringify(messages.filter((message) => !(message.stats instanceof Timing))));
  } catch {
    // a full or forbidden store: the conversation then ends with the tab
  }
}
