// What the browser remembers of the reader's wishes: sampling, system prompt, theme; and the key dialog.

const STORE = "octavo.settings";
const THEME = "octavo.theme";
const THEMES = ["auto", "light", "dark"];
const MARKS = { auto: "◐", light: "○", dark: "●" };
const NAMES = { auto: "automatic", light: "light", dark: "dark" };

/** The settings dialog. `toRequest(messages)` is the body of a chat request. */
export class Settings {
  #dialog;
  #form;
  #note;
  #values;

  constructor(dialog, opener, note) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    this.#note = note;
    this.#values = read(STORE, {});
    opener.addEventListener("click", () => this.#open());
    dialog.querySelector("#reset-settings").addEventListener("click", () => {
      for (const field of this.#fields()) field.value = "";
    });
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "save") this.#keep();
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // the backdrop
    });
    this.#tell();
  }

  toRequest(messages) {
    const { system, temperature, top_p, max_tokens, choices } = this.#values;
    const said = messages
      .filter(({ content }) => content)
      .map(({ role, content }) => ({ role, content }));
    const options = choices ? choices.split("\n").map((line) => line.trim()).filter(Boolean) : [];
    return {
      messages: system ? [{ role: "system", content: system }, ...said] : said,
      ...(temperature && { temperature: Number(temperature) }),
      ...(top_p && { top_p: Number(top_p) }),
      ...(max_tokens && { max_tokens: Number(max_tokens) }),
      ...(options.length && { structured_outputs: { choice: options } }),
    };
  }

  #open() {
    for (const field of this.#fields()) field.value = this.#values[field.name] ?? "";
    this.#dialog.returnValue = "";
    this.#dialog.showModal();
  }

  #keep() {
    this.#values = {};
    for (const field of this.#fields()) if (field.value.trim()) this.#values[field.name] = field.value.trim();
    write(STORE, this.#values);
    this.#tell();
  }

  #fields() {
    return [...this.#form.elements].filter((field) => field.name);
  }

  /** One quiet line under the message box, so that nobody wonders why answers are odd. */
  #tell() {
    const { system, temperature, top_p, max_tokens, choices } = this.#values;
    const parts = [
      system && "system prompt",
      temperature && `temperature ${temperature}`,
      top_p && `top p ${top_p}`,
      max_tokens && `at most ${max_tokens} tokens`,
      choices && "fixed answers",
    ].filter(Boolean);
    this.#note.textContent = parts.length ? ` · ${parts.join(", ")}` : "";
  }
}

/** The button that goes through the themes. `onChange()` is called when the page's colours changed. */
export function followTheme(button, onChange) {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = MARKS[theme];
    button.setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
    button.title = button.getAttribute("aria-label");
    onChange();
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(read(THEME, "auto")) + 1) % THEMES.length];
    write(THEME, next);
    show(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  const kept = read(THEME, "auto");
  show(THEMES.includes(kept) ? kept : "auto");
}

/** Asks for the key; resolves to it, or to null when the dialog was closed. */
export function askForKey(dialog, wasRefused) {
  const field = dialog.querySelector("input");
  dialog.querySelector("#key-about").textContent = wasRefused
    ? "The server does not know that key. It is kept until this tab is closed."
    : "It is kept until this tab is closed.";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const onClose = () => resolve(dialog.returnValue === "save" ? field.value.trim() || null : null);
    dialog.addEventListener("close", onClose, { once: true });
  });
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // a full or forbidden store: the wish then lasts as long as the tab
  }
}
