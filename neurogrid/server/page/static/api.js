// Requests to the server that this page came from, with its key where it wants one, and event streams read as they come.

import { thisTab } from "./storage.js";

let key = thisTab.get("key");

export function currentKey() {
  return key ?? "";
}

export function setKey(value) {
  key = value.trim() || null;
  thisTab.set("key", key);
}

/** What the server says is wrong. */
export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The answer to a request. A ServerError if it is no success; a TypeError where there is no answer at all. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  let message = `the server answered with status ${response.status}`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    code = error.code ?? null;
  } catch {
    // Not one of our server's own errors: a proxy's, perhaps.
  }
  throw new ServerError(response.status, message, code);
}

/** The events of a text/event-stream, as [event, data], until it ends. Source: the HTML standard, section 9.2. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield [event, data.join("\n")];
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("event:")) {
          event = line.slice(line[6] === " " ? 7 : 6);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream has failed already, and whoever reads knows
  }
}
