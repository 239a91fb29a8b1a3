// Making elements, and changing as few of them as possible.

export function element(tag, className = "", text = null) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== null) made.textContent = text;
  return made;
}

export function action(name, text, title) {
  const button = element("button", "quiet", text);
  button.type = "button";
  button.dataset.action = name;
  button.title = title;
  return button;
}

/** Copy the text, and say so on the button for a moment. */
export async function copy(button, text) {
  const before = button.textContent;
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    isCopied = copyTheOldWay(text);
  }
  button.textContent = isCopied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = before), 1500);
}

/** A page that came over plain HTTP from another machine has no clipboard, but may copy a selection. */
function copyTheOldWay(text) {
  const field = element("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

/** Make `box` hold what `fragment` holds, but leave what is the same untouched: somebody may be selecting it. */
export function renew(box, fragment) {
  const nodes = [...fragment.childNodes];
  nodes.forEach((node, i) => {
    const old = box.childNodes[i];
    if (!old) box.append(node);
    else if (old.className === "text" && node.className === "text") renew(old, node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (box.childNodes.length > nodes.length) box.lastChild.remove();
}

/** Make `footer` hold `parts`; where only texts differ, its buttons stay, and with them the focus. */
export function relabel(footer, parts) {
  const kind = (part) => `${part.tagName} ${part.className} ${part.dataset.action}`;
  const old = [...footer.children];
  if (old.length !== parts.length || old.some((part, i) => kind(part) !== kind(parts[i]))) {
    footer.replaceChildren(...parts);
    return;
  }
  old.forEach((part, i) => {
    if (part.textContent !== parts[i].textContent) part.lastChild.textContent = parts[i].textContent;
    part.title = parts[i].title;
  });
}

/** The innermost last element that is a line of text: where the next word will stand. */
export function lastLine(box) {
  let last = box;
  while (/^(UL|OL|LI|P|BLOCKQUOTE|DIV|PRE|CODE|H[1-6])$/.test(last.lastElementChild?.tagName)) {
    if (last.lastElementChild.nextSibling?.textContent.trim()) break; // text follows that element
    last = last.lastElementChild;
  }
  return last;
}
