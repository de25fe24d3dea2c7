// Conversations of before: kept in this browser while Settings say so, opened again, exported, deleted.

import { byId, html, setText } from "./dom.js";
import { always } from "./storage.js";
import { areTurns, markdownOf, messagesOf, titleOf } from "./turns.js";

// Browsers keep some 5 MB for a page: the oldest go first.
const MAX_KEPT = 100;
const MAX_CHARS = 2_000_000;

/** What is kept: { id, at, turns, asText }, the newest first. */
export class History {
  /** Asked each time: Settings may say so in another tab. */
  get isOn() {
    return always.get("history") !== "off";
  }

  list() {
    try {
      const kept = JSON.parse(always.get("conversations", "[]"));
      if (Array.isArray(kept)) return kept.filter((one) => typeof one?.id === "string" && areTurns(one.turns) && one.turns.length);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    return [];
  }

  /** Keep a conversation as it is now, in the place of what was kept of it. */
  keep({ id, turns, asText }) {
    if (!this.isOn || !turns.length) return;
    const before = this.list();
    const known = before.find((one) => one.id === id);
    if (known && JSON.stringify(known.turns) === JSON.stringify(turns)) return;
    const now = { id, at: Date.now(), turns, asText };
    // One that leaves no room for others, with images mostly: they stay, and so does what was kept of it.
    if (JSON.stringify(now).length > MAX_CHARS) return;
    this.write([now, ...before.filter((one) => one.id !== id)]);
  }

  delete(id) {
    this.write(this.list().filter((one) => one.id !== id));
  }

  clear() {
    this.write([]);
  }

  /** Keep conversations from here on, or none, and those of before no longer. */
  turn(isOn) {
    always.set("history", isOn ? null : "off");
    if (!isOn) this.clear();
  }

  write(list) {
    let texts = list.slice(0, MAX_KEPT).map((one) => JSON.stringify(one));
    let length = 0;
    texts = texts.filter((text) => (length += text.length) <= MAX_CHARS);
    always.set("conversations", texts.length ? `[${texts.join(",")}]` : null);
  }
}

/** The dialog in which they stand. */
export class HistoryDialog {
  /** `open(conversation)` shows one again; `current()` is the one that is shown, with its `id` and `turns`. */
  constructor(history, { open, current }) {
    this.history = history;
    this.open = open;
    this.current = current;
    this.dialog = byId("history");
    this.list = byId("conversations");
    byId("history-button").addEventListener("click", () => {
      this.draw();
      this.dialog.showModal();
    });
    byId("clear-history").addEventListener("click", () => {
      this.history.clear();
      this.draw();
    });
    byId("export-markdown").addEventListener("click", () => download(current().turns, "md"));
    byId("export-json").addEventListener("click", () => download(current().turns, "json"));
  }

  draw() {
    const kept = this.history.list();
    this.list.replaceChildren(...kept.map((one) => this.row(one)));
    byId("clear-history").hidden = !kept.length;
    byId("no-conversations").hidden = kept.length > 0;
    setText(byId("no-conversations"), this.history.isOn ? "None yet." : "None are kept: Settings say so.");
    const isEmpty = !this.current().turns.length;
    for (const id of ["export-markdown", "export-json"]) byId(id).disabled = isEmpty;
  }

  row(one) {
    const title = titleOf(one.turns);
    const again = html("button", { type: "button", class: "conversation", "aria-current": one.id === this.current().id ? "true" : null }, title);
    again.append(html("time", { datetime: new Date(one.at).toISOString() }, new Date(one.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })));
    again.addEventListener("click", () => {
      this.dialog.close();
      this.open(one);
    });
    const gone = html("button", { type: "button", class: "text-button", "aria-label": `Delete: ${title}` }, "Delete");
    gone.addEventListener("click", () => {
      this.history.delete(one.id);
      this.draw();
    });
    return html("li", {}, again, gone);
  }
}

/** Have the browser save a conversation: "md" for people, "json" as `messages` of the API. */
function download(turns, kind) {
  const text = kind === "md" ? markdownOf(turns) : `${JSON.stringify({ messages: messagesOf(turns) }, null, 2)}\n`;
  const type = kind === "md" ? "text/markdown" : "application/json";
  const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const name = titleOf(turns).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
  html("a", { href: url, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
