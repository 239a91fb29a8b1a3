// Markdown of a model, which is nobody's trusted text, to elements that are safe to show.

import DOMPurify from "./purify.mjs";
import { Marked } from "./marked.js";

const marked = new Marked({ gfm: true, breaks: true });

// HTML that a model writes is shown as what it is: text.
marked.use({ renderer: { html: ({ text }) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;") } });

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "input",
    "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "type"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
  }
  // The only input Markdown makes is the box of a task list.
  if (node.tagName === "INPUT" && node.type !== "checkbox") node.remove();
});

/** A DocumentFragment for the text. Images become nothing: a page must not fetch what a model names. */
export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const block of fragment.querySelectorAll("pre")) {
    block.tabIndex = 0; // wide code scrolls, also by keyboard
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy-code quiet";
    button.textContent = "Copy";
    const box = document.createElement("div");
    box.className = "code";
    block.replaceWith(box);
    box.append(block, button);
  }
  return fragment;
}
