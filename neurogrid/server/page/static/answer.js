// One answer in the conversation: its text as it comes, why it pauses, and what can be done with it.

import { html, setText } from "./dom.js";
import { duration, perSecond } from "./format.js";
import { Markdown, copies } from "./markdown.js";

// Text that came is shown that often at most. Milliseconds.
const SHOW_EVERY = 60;
// Nothing came for so long: it is said why. Milliseconds.
const PAUSE = 1200;

export class Answer {
  /** `around(draw)` is what is done when it is drawn: call `draw`, and scroll, say. */
  constructor(list, around = (draw) => draw()) {
    this.around = around;
    this.text = "";
    this.usage = null;
    this.reason = "";
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.now = ""; // the trouble that is waited for now
    this.trouble = ""; // that the longest pause was due to
    this.pause = 0; // how long that was, in milliseconds
    this.timer = 0;
    this.thoughts = "";
    this.calls = []; // { id, name, arguments }
    this.thinking = html("div", { class: "thoughts-text" });
    this.thought = html("details", { class: "thoughts", hidden: true }, html("summary", {}, "Thoughts"), this.thinking);
    this.content = html("div", { class: "text" });
    this.called = html("ul", { class: "calls" });
    this.markdown = new Markdown(this.content);
    this.note = html("p", { class: "message-note" });
    this.element = html("li", { class: "message assistant is-writing" }, this.thought, this.content, this.called, this.note);
    list.append(this.element);
  }

  add(text) {
    this.came();
    if (!this.text) text = text.trimStart(); // a model that continues text begins with a space
    if (text && !this.text) this.thought.open = false;
    this.text += text;
  }

  /** Text that the model writes for itself, before the answer. */
  addThought(text) {
    this.came();
    if (!this.thoughts) {
      text = text.trimStart();
      this.thought.open = !this.text;
    }
    this.thoughts += text;
  }

  /** A piece of a call of a tool, as a `tool_calls` delta of the API has it. */
  addCall({ index, id, function: told = {} }) {
    this.came();
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    call.name += told.name ?? "";
    call.arguments += told.arguments ?? "";
  }

  came() {
    const now = performance.now();
    this.endPause(now);
    this.first ??= now;
    this.last = now;
    this.timer ||= setTimeout(() => this.show(), SHOW_EVERY);
  }

  show() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.around(() => {
      this.markdown.update(this.text);
      this.thought.hidden = !this.thoughts;
      setText(this.thinking, this.thoughts);
      this.called.replaceChildren(...this.calls.map(callView));
    });
  }

  /** Say why nothing comes, once nothing has come for a while. `reason` is as `reasonToWait` gives it. */
  wait(reason) {
    const silent = performance.now() - (this.last ?? this.began);
    if (silent < PAUSE) return;
    this.element.classList.add("is-waiting");
    if (reason.isTrouble) this.now = reason.text;
    const text = reason.text.charAt(0).toUpperCase() + reason.text.slice(1);
    setText(this.note, `${text} … ${duration(Math.round(silent / 1000))}`);
  }

  endPause(now) {
    const length = now - (this.last ?? this.began);
    if (this.now && length > this.pause) {
      this.pause = length;
      this.trouble = this.now;
    }
    this.now = "";
    if (this.element.classList.contains("is-waiting")) {
      this.element.classList.remove("is-waiting");
      setText(this.note, "");
    }
  }

  /** Show a text that was written before the page was loaded. */
  restore({ content, note, thoughts = "", calls = [] }) {
    this.text = content;
    this.thoughts = thoughts;
    this.calls = calls;
    this.show();
    this.element.classList.remove("is-writing");
    setText(this.note, note ?? "");
    if (content) this.note.append(this.copyButton());
  }

  end(reason = this.reason) {
    this.endPause(performance.now());
    this.show();
    this.element.classList.remove("is-writing");
    const parts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    if (this.first !== null) parts.push(`first after ${duration((this.first - this.began) / 1000)}`);
    if (tokens > 1 && this.last > this.first) parts.push(`${perSecond((tokens - 1) / ((this.last - this.first) / 1000))} a second`);
    if (reason === "length") parts.push("the longest that Settings allow");
    if (reason === "stopped") parts.push("stopped");
    if (this.trouble) parts.push(`a pause of ${duration(this.pause / 1000)}: ${this.trouble}`);
    if (!this.text && !this.calls.length) this.content.append(html("p", { class: "nothing" }, reason === "stopped" ? "Nothing was written." : "The model wrote nothing."));
    setText(this.note, parts.join(" · "));
    if (this.text) this.note.append(this.copyButton());
  }

  copyButton() {
    const button = html("button", { type: "button", class: "text-button copy" }, "Copy");
    copies(button, () => this.text);
    return button;
  }

  fail(message) {
    this.endPause(performance.now());
    this.show();
    this.element.classList.remove("is-writing");
    this.element.classList.add("is-failed");
    setText(this.note, message);
  }

  /** A button beneath the answer; with `isLast`, only while nothing follows. */
  offer(name, action, { isLast = false } = {}) {
    const button = html("button", { type: "button", class: `text-button${isLast ? " if-last" : ""}` }, name);
    button.addEventListener("click", action);
    this.note.append(button);
  }

  remove() {
    clearTimeout(this.timer);
    this.element.remove();
  }
}

/** A call of a tool: its name, and its arguments as JSON that people read. */
function callView({ name, arguments: given }) {
  let text = given;
  try {
    text = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // It is being written, or is no JSON: as it stands.
  }
  return html("li", { class: "call" }, html("p", { class: "call-name" }, name), html("pre", {}, html("code", {}, text)));
}
