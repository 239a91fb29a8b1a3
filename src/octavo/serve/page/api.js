// Talking to the server: the API key, JSON, and server-sent events (read with fetch, because an EventSource
// can neither send a key nor a body).

const KEY = "octavo.key";

/** An answer of the server that is an error. */
export class ServerError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

let askForKey = null;
let asking = null;

/** `ask()` is called when the server wants a key; it resolves to one, or to null when nobody gives one. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** fetch, with the key where one is known. Throws a ServerError for what is not a success. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: {
        ...(body && { "Content-Type": "application/json" }),
        ...(key && { Authorization: `Bearer ${key}` }),
      },
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401 || !(await gotKey(key))) throw await errorOf(response);
  }
}

/** Whether there is a key now that is not the refused one. Several callers share one question. */
async function gotKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true;
  asking ??= askForKey(Boolean(refused)).finally(() => (asking = null));
  const key = await asking;
  if (key) sessionStorage.setItem(KEY, key);
  return Boolean(key);
}

async function errorOf(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of the server's own errors: the status has to do
  }
  return new ServerError(response.status, message, Number(response.headers.get("Retry-After")) || null);
}

/** Yields {event, data} for each server-sent event of the answer. */
export async function* events(path, options) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = parse(part);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(text) {
  let event = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
