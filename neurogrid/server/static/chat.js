// The conversation: what is written goes out, what comes back is shown as it comes, and can be stopped.

import { ask, eventsOf } from "./api.js";
import { byId, html, setText } from "./dom.js";
import { duration, perSecond } from "./format.js";

// How near to the end somebody reads who wants to see what comes. Pixels.
const NEAR_END = 80;
// How often what has come since is read aloud: a few words, not letters. Milliseconds.
const SPEAK_EVERY = 4000;

export class Chat {
  /**
   * `settings()` gives { temperature, maxTokens }; `model()` the name of the model; `onKey()`, awaited, has the key
   * asked for.
   */
  constructor({ settings, model, onKey }) {
    this.settings = settings;
    this.model = model;
    this.onKey = onKey;
    this.turns = [];
    this.running = null;
    this.asText = false; // the model has no chat template: it continues what is written
    this.scroll = byId("scroll");
    this.list = byId("messages");
    this.welcome = byId("welcome");
    this.form = byId("composer");
    this.prompt = byId("prompt");
    this.send = byId("send");
    this.spoken = byId("spoken");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.submit();
      }
    });
    this.prompt.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("new-chat").addEventListener("click", () => this.begin());
  }

  begin() {
    this.stop();
    this.turns = [];
    this.list.replaceChildren();
    this.welcome.hidden = false;
    this.prompt.focus();
  }

  suggest(texts) {
    const items = texts.map((text) => {
      const button = html("button", { type: "button", class: "suggestion" }, text);
      button.addEventListener("click", () => {
        this.prompt.value = text;
        if (!this.running) this.submit();
      });
      return html("li", {}, button);
    });
    byId("suggestions").replaceChildren(...items);
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, 220)}px`;
  }

  stop() {
    this.running?.abort();
  }

  submit() {
    const text = this.prompt.value.trim();
    if (!text) return;
    this.prompt.value = "";
    this.fit();
    this.welcome.hidden = true;
    this.turns.push({ role: "user", content: text });
    this.list.append(html("li", { class: "message user" }, html("p", { class: "text" }, text)));
    this.answer();
  }

  async answer() {
    const view = new Answer(this.list);
    const controller = new AbortController();
    this.running = controller;
    this.showRunning(true);
    this.follow(true);
    let numSpoken = 0;
    const speak = () => {
      setText(this.spoken, view.text.slice(numSpoken));
      numSpoken = view.text.length;
    };
    const speaking = setInterval(speak, SPEAK_EVERY);
    const turns = this.turns;
    try {
      await this.stream(view, controller.signal);
      view.end();
    } catch (error) {
      if (controller.signal.aborted) view.end("stopped");
      else if (error.status === 401) {
        view.fail("This server asks for a key.");
        this.running = null;
        this.showRunning(false);
        await this.onKey();
        view.remove();
        clearInterval(speaking);
        if (this.turns === turns) await this.answer();
        return;
      } else {
        const message = error instanceof TypeError ? "The connection to the server is lost." : error.message;
        view.fail(message, "Try again", () => this.again(view));
        if (error.code === "chat_template") {
          view.offer("Let it continue the text", () => {
            this.asText = true;
            this.again(view);
          });
        }
      }
    } finally {
      clearInterval(speaking);
    }
    if (this.turns === turns && view.text) turns.push({ role: "assistant", content: view.text });
    speak();
    if (this.running === controller) {
      this.running = null;
      this.showRunning(false);
    }
    this.follow();
  }

  again(view) {
    if (this.running) return;
    view.remove();
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop();
    this.answer();
  }

  async stream(view, signal) {
    const { temperature, maxTokens } = this.settings();
    const input = this.asText ? { prompt: this.turns.at(-1).content } : { messages: this.turns };
    const body = {
      model: this.model(),
      ...input,
      temperature,
      max_tokens: maxTokens,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await ask(this.asText ? "/v1/completions" : "/v1/chat/completions", { body, signal });
    for await (const [, data] of eventsOf(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text;
      if (text) {
        const isNear = this.isNearEnd();
        view.add(text);
        this.follow(isNear);
      }
      if (choice?.finish_reason) view.reason = choice.finish_reason;
      if (chunk.usage) view.usage = chunk.usage;
    }
    throw new Error("The answer broke off: the server closed the connection.");
  }

  isNearEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  follow(isNear = this.isNearEnd()) {
    if (isNear) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  showRunning(isRunning) {
    this.form.classList.toggle("is-busy", isRunning);
    this.send.setAttribute("aria-label", isRunning ? "Stop" : "Send");
    this.send.title = isRunning ? "Stop (Escape)" : "Send (Enter)";
  }
}

class Answer {
  constructor(list) {
    this.text = "";
    this.usage = null;
    this.reason = "";
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.content = html("p", { class: "text" });
    this.note = html("p", { class: "message-note" });
    this.element = html("li", { class: "message assistant is-writing" }, this.content, this.note);
    list.append(this.element);
  }

  add(text) {
    const now = performance.now();
    this.first ??= now;
    this.last = now;
    if (!this.text) text = text.trimStart(); // a model that continues text begins with a space
    this.text += text;
    // Text nodes are added to, not written anew: a selection in what was there stays.
    this.content.append(text);
  }

  end(reason = this.reason) {
    this.element.classList.remove("is-writing");
    const parts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    if (this.first !== null) parts.push(`first after ${duration((this.first - this.began) / 1000)}`);
    if (tokens > 1 && this.last > this.first) parts.push(`${perSecond((tokens - 1) / ((this.last - this.first) / 1000))} a second`);
    if (reason === "length") parts.push("the longest that Settings allow");
    if (reason === "stopped") parts.push("stopped");
    if (!this.text) this.content.append(html("em", {}, reason === "stopped" ? "Nothing was written." : "The model wrote nothing."));
    setText(this.note, parts.join(" · "));
    if (this.text) this.note.append(this.copyButton());
  }

  copyButton() {
    const button = html("button", { type: "button", class: "text-button copy" }, "Copy");
    button.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(this.text);
      setText(button, "Copied");
      setTimeout(() => setText(button, "Copy"), 1500);
    });
    return button;
  }

  fail(message, name, again) {
    this.element.classList.remove("is-writing");
    this.element.classList.add("is-failed");
    setText(this.note, message);
    if (again) this.offer(name, again);
  }

  offer(name, action) {
    const button = html("button", { type: "button", class: "text-button" }, name);
    button.addEventListener("click", action);
    this.note.append(button);
  }

  remove() {
    this.element.remove();
  }
}
