// The conversation: what is written goes out, what comes back is shown as it comes, and can be stopped. It is kept in the
// tab, and is there again when the page is loaded anew. Where the model calls a tool, what is written next is what the
// tool gives.

import { Answer } from "./answer.js";
import { ask, eventsOf } from "./api.js";
import { Attachments } from "./attachments.js";
import { byId, html, setText } from "./dom.js";
import { reasonToWait } from "./pause.js";
import { thisTab } from "./storage.js";
import { areTurns, messagesOf, openCalls } from "./turns.js";

// How near to the end somebody reads who wants to see what comes. Pixels.
const NEAR_END = 80;
// How often what has come since is read aloud: a few words, not letters. Milliseconds.
const SPEAK_EVERY = 4000;
// How often it is looked whether an answer pauses, and what has come is kept. Milliseconds.
const LOOK_EVERY = 300;
const KEEP_EVERY = 1000;

export class Chat {
  /**
   * `settings()` gives { temperature, maxTokens, system, tools }; `model()` the name of the model; `status()` what is
   * known of the cluster, null without a connection; `onKey()`, awaited, has the key asked for; `history` keeps
   * conversations beyond this tab; `takesImages()` tells whether the model does.
   */
  constructor({ settings, model, status, onKey, history, takesImages }) {
    this.settings = settings;
    this.model = model;
    this.status = status;
    this.onKey = onKey;
    this.history = history;
    this.id = newId();
    this.turns = []; // as turns.js has them
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
    this.attachments = new Attachments(takesImages);
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
    // What was deleted from the history is not to be in it again for that the page is left.
    addEventListener("pagehide", () => this.keepInTab());
    this.restore();
  }

  /** The conversation of before the page was loaded anew. */
  restore() {
    const conversation = kept();
    if (conversation) this.showAll(conversation);
  }

  /** Another conversation in the place of this one. */
  open(conversation) {
    if (conversation.id === this.id) return;
    this.begin();
    this.showAll(conversation);
    this.keep();
  }

  showAll({ id, turns, asText }) {
    this.id = id;
    this.turns = turns;
    this.asText = asText === true;
    this.welcome.hidden = true;
    let view = null;
    for (const turn of turns) {
      if (turn.role === "assistant") {
        view = new Answer(this.list);
        view.restore(turn);
      } else this.showUser(turn);
    }
    if (turns.at(-1).role !== "assistant" && !openCalls(turns).length) {
      view = new Answer(this.list);
      view.restore({ content: "", note: "The page was loaded anew before an answer came." });
    }
    if (turns.at(-1).role === "assistant" || !openCalls(turns).length) this.offerAgain(view);
    this.showWanted();
    this.follow(true);
  }

  keep() {
    const { id, turns, asText } = this;
    this.keepInTab();
    if (!this.writing) this.history.keep({ id, turns, asText });
  }

  keepInTab() {
    const turns = [...this.turns];
    if (this.writing?.text) turns.push(turnOf(this.writing, "the page was loaded anew while this was written"));
    const { id, asText } = this;
    thisTab.set("chat", turns.length ? JSON.stringify({ id, turns, asText }) : null);
  }

  offerAgain(view) {
    view.offer("Write it anew", () => this.again(view), { isLast: true });
  }

  /** A turn of somebody's own, or what a tool gave. */
  showUser({ role, name, content, images }) {
    const isTool = role === "tool";
    const item = html("li", { class: `message ${isTool ? "tool" : "user"}` });
    if (isTool) item.append(html("p", { class: "call-name" }, `${name} gave`));
    if (images?.length) {
      const pictures = images.map((url, index) => html("img", { src: url, alt: `Image ${index + 1}` }));
      item.append(html("p", { class: "pictures" }, ...pictures));
    }
    if (content) item.append(html("p", { class: "text" }, content));
    this.list.append(item);
  }

  /** Say what the next text is: a message, or what a tool gives. */
  showWanted() {
    const [call] = openCalls(this.turns);
    this.prompt.placeholder = call ? `What ${call.name} gives` : "Write a message";
  }

  begin() {
    if (this.writing) {
      const turns = this.writing.text ? [...this.turns, turnOf(this.writing, "stopped")] : this.turns;
      this.history.keep({ id: this.id, turns, asText: this.asText });
    }
    this.stop();
    this.attachments.take();
    this.id = newId();
    this.turns = [];
    this.writing = null;
    this.keep();
    this.showWanted();
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
    const [call] = openCalls(this.turns);
    if (!text && (call || !this.attachments.urls.length)) return;
    this.prompt.value = "";
    this.fit();
    this.welcome.hidden = true;
    const turn = call ? { role: "tool", id: call.id, name: call.name, content: text } : { role: "user", content: text };
    const images = call ? [] : this.attachments.take();
    if (images.length) turn.images = images;
    this.turns.push(turn);
    this.showUser(turn);
    this.keep();
    this.showWanted();
    if (openCalls(this.turns).length) this.follow(true);
    else this.answer();
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
        timers.forEach(clearInterval); // the answer that takes its place has its own
        await this.onKey();
        view.remove();
        if (this.turns === turns) await this.answer();
        return;
      } else {
        view.fail(error instanceof TypeError ? "The connection to the server is lost." : error.message);
        // As long as it is the last: later, what would be asked again is another turn.
        view.offer("Try again", () => this.again(view), { isLast: true });
        if (error.code === "chat_template") {
          const goOn = () => {
            this.asText = true;
            this.again(view);
          };
          view.offer("Let it continue the text", goOn, { isLast: true });
        }
      }
    } finally {
      timers.forEach(clearInterval);
      if (this.writing === view) this.writing = null;
    }
    if (this.turns === turns) {
      if (view.text || view.calls.length) turns.push(turnOf(view));
      if (!view.element.classList.contains("is-failed")) this.offerAgain(view);
      this.keep();
      this.showWanted();
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
    const { temperature, maxTokens, system, tools } = this.settings();
    const messages = messagesOf(this.turns);
    if (system) messages.unshift({ role: "system", content: system });
    const input = this.asText ? { prompt: this.turns.at(-1).content } : { messages };
    if (tools && !this.asText) input.tools = tools;
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
      if (choice?.delta?.reasoning_content) view.addThought(choice.delta.reasoning_content);
      if (text) view.add(text);
      for (const call of choice?.delta?.tool_calls ?? []) view.addCall(call);
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
  const turn = { role: "assistant", content: view.text, note: note ?? said };
  if (view.thoughts) turn.thoughts = view.thoughts;
  if (view.calls.length) turn.calls = view.calls;
  return turn;
}

function newId() {
  // Not crypto.randomUUID, which pages over plain HTTP do not have.
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What the tab has kept, checked; null for nothing. */
function kept() {
  try {
    const found = JSON.parse(thisTab.get("chat", "null"));
    if (found && areTurns(found.turns) && found.turns.length) return { ...found, id: typeof found.id === "string" ? found.id : newId() };
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  return null;
}
