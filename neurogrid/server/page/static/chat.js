// The conversation: what is written goes out, what comes back is shown as it comes, and can be stopped. It is kept in the
// tab, and is there again when the page is loaded anew.

import { Answer } from "./answer.js";
import { ask, eventsOf } from "./api.js";
import { byId, html, setText } from "./dom.js";
import { reasonToWait } from "./pause.js";
import { thisTab } from "./storage.js";

// How near to the end somebody reads who wants to see what comes. Pixels.
const NEAR_END = 80;
// How often what has come since is read aloud: a few words, not letters. Milliseconds.
const SPEAK_EVERY = 4000;
// How often it is looked whether an answer pauses, and what has come is kept. Milliseconds.
const LOOK_EVERY = 300;
const KEEP_EVERY = 1000;

export class Chat {
  /**
   * `settings()` gives { temperature, maxTokens, system }; `model()` the name of the model; `status()` what is known of
   * the cluster, null without a connection; `onKey()`, awaited, has the key asked for.
   */
  constructor({ settings, model, status, onKey }) {
    this.settings = settings;
    this.model = model;
    this.status = status;
    this.onKey = onKey;
    this.turns = []; // { role, content } and, of an answer, `note`
    this.running = null;
    this.writing = null; // the answer that is being written
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
    addEventListener("pagehide", () => this.keep());
    this.restore();
  }

  /** The conversation of before the page was loaded anew. */
  restore() {
    const { turns, asText } = kept();
    if (!turns.length) return;
    this.turns = turns;
    this.asText = asText;
    this.welcome.hidden = true;
    let view = null;
    for (const turn of turns) {
      if (turn.role === "user") this.showUser(turn.content);
      else {
        view = new Answer(this.list);
        view.restore(turn.content, turn.note);
      }
    }
    if (turns.at(-1).role === "user") {
      view = new Answer(this.list);
      view.restore("", "The page was loaded anew before an answer came.");
    }
    this.offerAgain(view);
    this.follow(true);
  }

  keep() {
    const turns = [...this.turns];
    if (this.writing?.text) turns.push(turnOf(this.writing, "the page was loaded anew while this was written"));
    thisTab.set("chat", turns.length ? JSON.stringify({ turns, asText: this.asText }) : null);
  }

  offerAgain(view) {
    view.offer("Write it anew", () => this.again(view), { isLast: true });
  }

  showUser(text) {
    this.list.append(html("li", { class: "message user" }, html("p", { class: "text" }, text)));
  }

  begin() {
    this.stop();
    this.turns = [];
    this.writing = null;
    this.keep();
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
    this.showUser(text);
    this.keep();
    this.answer();
  }

  async answer() {
    const view = new Answer(this.list, (draw) => {
      const isNear = this.isNearEnd();
      draw();
      this.follow(isNear);
    });
    const controller = new AbortController();
    this.running = controller;
    this.writing = view;
    this.showRunning(true);
    this.follow(true);
    let numSpoken = 0;
    const speak = () => {
      setText(this.spoken, view.text.slice(numSpoken));
      numSpoken = view.text.length;
    };
    const turns = this.turns;
    const timers = [
      setInterval(speak, SPEAK_EVERY),
      setInterval(() => view.wait(reasonToWait(this.status(), view.first !== null)), LOOK_EVERY),
      setInterval(() => this.turns === turns && this.keep(), KEEP_EVERY),
    ];
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
        if (this.turns === turns) await this.answer();
        return;
      } else {
        view.fail(error instanceof TypeError ? "The connection to the server is lost." : error.message);
        view.offer("Try again", () => this.again(view));
        if (error.code === "chat_template") {
          view.offer("Let it continue the text", () => {
            this.asText = true;
            this.again(view);
          });
        }
      }
    } finally {
      timers.forEach(clearInterval);
      if (this.writing === view) this.writing = null;
    }
    if (this.turns === turns) {
      if (view.text) turns.push(turnOf(view));
      if (!view.element.classList.contains("is-failed")) this.offerAgain(view);
      this.keep();
    }
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
    const { temperature, maxTokens, system } = this.settings();
    const messages = this.turns.map(({ role, content }) => ({ role, content }));
    if (system) messages.unshift({ role: "system", content: system });
    const input = this.asText ? { prompt: this.turns.at(-1).content } : { messages };
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
        view.add(text);
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

/** A turn as it is kept: what was said of the answer beneath it, without the buttons. */
function turnOf(view, note) {
  const said = [...view.note.childNodes].find((node) => node.nodeType === Node.TEXT_NODE)?.textContent ?? "";
  return { role: "assistant", content: view.text, note: note ?? said };
}

/** What the tab has kept, checked: another version of the page may have written it. */
function kept() {
  try {
    const { turns, asText } = JSON.parse(thisTab.get("chat", "{}")) ?? {};
    const isTurn = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
    if (Array.isArray(turns) && turns.every(isTurn)) return { turns, asText: asText === true };
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  return { turns: [], asText: false };
}
