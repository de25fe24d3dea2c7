// What happened, newest first; a loss says when it was mended.

import { clock, duration, layers, shortId, withShortIds } from "./format.js";
import { html, setText } from "./dom.js";

const SHOW_LOSS = 60; // seconds

export class Entry {
  constructor() {
    this.time = html("time", { class: "log-time" });
    this.text = html("span", { class: "log-text" });
    this.after = html("span", { class: "log-after" });
    this.element = html(
      "li",
      { class: "entry" },
      html("span", { class: "log-mark", "aria-hidden": "true" }),
      html("div", {}, html("p", {}, this.text), html("p", { class: "log-line" }, this.time, this.after)),
    );
  }

  update({ event, failure }) {
    const isMended = failure?.recovered_at != null;
    this.element.dataset.severity = isMended && event.severity === "error" ? "warning" : event.severity;
    this.element.dataset.kind = event.kind;
    setText(this.text, withShortIds(event.text));
    setText(this.time, clock(event.at));
    const seconds = isMended ? failure.recovered_at - failure.at : 0;
    const after = isMended ? (seconds > 0.005 ? `all layers there again after ${duration(seconds)}` : "no layer was missing") : "";
    setText(this.after, after);
  }
}

/** The last loss, in words, while it is not mended and for a minute after; empty otherwise. */
export function lastLoss(status) {
  const failure = (status.failures ?? []).at(-1);
  if (!failure) return "";
  const isMended = failure.recovered_at != null;
  if (isMended && !status.events.some((one) => one.kind === "worker_lost" && one.at >= status.now - SHOW_LOSS)) return "";
  const seconds = isMended ? failure.recovered_at - failure.at : 0;
  const after = seconds > 0.005 ? `, after ${duration(seconds)}` : "";
  const had = failure.layers.stop > failure.layers.start ? ` (${layers(failure.layers)})` : "";
  const machine = status.peers[failure.peer_id]?.machine;
  return withShortIds(`Lost ${machine ? `${machine} ` : ""}${shortId(failure.peer_id)}${had}: ${failure.action}${after}.`);
}

/** The entries for what is known: each event, and for a loss what became of it. */
export function entries(status, most) {
  const failures = status.failures ?? [];
  return status.events
    .slice(-most)
    .reverse()
    .map((event) => ({
      event,
      failure:
        event.kind === "worker_lost"
          ? failures.find((one) => one.peer_id === event.peer_id && Math.abs(one.at - event.at) < 0.5)
          : undefined,
    }));
}
