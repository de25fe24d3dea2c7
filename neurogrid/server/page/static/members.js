// The members of a run as a list: what each does, how fast it is, what it learned, for how long it is lent.

import { bytes, count, duration, shortId } from "./format.js";
import { html, setAttributes, setText } from "./dom.js";
import { stageColour } from "./picture.js";

const STATES = {
  asked: "is asked",
  starting: "starting",
  ready: "ready",
  training: "training",
  averaging: "averaging",
  waiting: "waits for work",
  failed: "failed",
  away: "cannot be reached",
};
// As the page of a cluster colours them.
const HEALTH = { failed: "lost", away: "lost", asked: "resting", starting: "receiving", averaging: "receiving", waiting: "receiving" };

/** The colour of a seat, and of its cells in the rounds. */
export function seatColour(seat) {
  return seat == null ? "var(--quiet)" : stageColour((seat % 7) + 1);
}

// What is told of a member with a whole model, and of a stage of a chain.
const FACTS = ["Loss", "Cosine", "Gradient", "Memory", "At once", "Lease", "Rounds", "Late"];
const STAGE_FACTS = ["Layers", "Step", "Under way", "Waits", "Memory", "Lease"];

/** The layers that a stage has, in words. */
function layers({ start, stop }) {
  return stop - start === 1 ? `${start}` : `${start} to ${stop - 1}`;
}

/** What stands above the members of a stage that has several. */
export class StageHead {
  constructor() {
    this.element = html("li", { class: "stage-head" });
  }

  update({ head, count: number }) {
    this.element.style.setProperty("--stage", seatColour(head.number));
    setText(this.element, `Stage ${head.number} · layers ${layers(head)} · ${number} member${number === 1 ? "" : "s"}`);
  }
}

/** Members in order; where a stage has several, what stands above those of each stage, too. */
export function grouped(members) {
  const counts = new Map();
  for (const { stage } of members) if (stage) counts.set(stage.number, (counts.get(stage.number) ?? 0) + 1);
  if (Math.max(0, ...counts.values()) < 2) return members.map((member) => ({ member }));
  return members.flatMap((member, index) => {
    const { stage } = member;
    const isFirst = stage && stage.number !== members[index - 1]?.stage?.number;
    return [...(isFirst ? [{ head: stage, count: counts.get(stage.number) }] : []), { member }];
  });
}

export class Member {
  constructor() {
    this.badge = html("span", { class: "badge", "aria-hidden": "true" });
    this.name = html("span", { class: "worker-name" });
    this.id = html("code", { class: "worker-id" });
    this.state = html("span", { class: "health" });
    this.doing = html("p", { class: "worker-role" });
    this.done = html("span", { class: "meter-own" });
    this.meter = html("div", { class: "meter", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Batches of its work" }, this.done);
    this.fast = html("span", { class: "speed-own" });
    this.rate = html("dd");
    this.facts = new Map();
    const facts = [...new Set([...STAGE_FACTS.slice(0, 4), ...FACTS])].map((name) => {
      const value = html("dd");
      this.facts.set(name, value);
      return html("div", {}, html("dt", {}, name), value);
    });
    this.speed = html("div", { class: "speed" }, html("dt", {}, "Tokens a second"), this.rate, html("div", { class: "speed-bar", "aria-hidden": "true" }, this.fast));
    this.list = html("dl", { class: "facts run-facts" }, this.speed, ...facts);
    this.versions = html("p", { class: "worker-where" });
    this.reason = html("p", { class: "reason" });
    this.element = html(
      "li",
      { class: "worker" },
      html("div", { class: "worker-head" }, this.badge, html("div", { class: "worker-title" }, this.name, this.id), this.state),
      this.doing,
      this.meter,
      this.list,
      this.versions,
      this.reason,
    );
  }

  update({ member, fastest, isChain }) {
    const { stage } = member;
    const place = stage ? stage.number : member.seat;
    this.element.dataset.health = HEALTH[member.state] ?? "ready";
    this.element.dataset.peer = member.peer_id;
    this.element.dataset.state = member.state;
    this.element.style.setProperty("--stage", seatColour(place));
    setText(this.badge, place == null ? "·" : `${place}`);
    setText(this.name, member.name);
    setText(this.id, shortId(member.peer_id));
    setAttributes(this.id, { title: member.peer_id });
    const standsBy = isChain && !stage && !member.reason && ["ready", "waiting"].includes(member.state);
    setText(this.state, standsBy ? "stands by" : (STATES[member.state] ?? member.state));
    // Of a chain micro-batches of a step, where others have batches of a round.
    const all = isChain ? (stage?.micro_batches ?? 0) : member.batches;
    const isBusy = member.state === "training" && all > 0;
    const done = Math.min(isChain ? (stage?.done ?? 0) : member.batches_done, all);
    const of = isChain ? `micro-batches of step ${count((stage?.step ?? 0) + 1)}` : `batches of round ${member.round + 1}`;
    setText(this.doing, isBusy ? `${done} of ${all} ${of}` : member.round ? `has round ${member.round}` : "");
    this.doing.hidden = !this.doing.textContent;
    this.meter.hidden = !isBusy;
    if (isBusy) {
      const percent = Math.round((100 * done) / all);
      this.done.style.width = `${percent}%`;
      setAttributes(this.meter, { "aria-valuenow": percent });
    }
    this.list.hidden = place == null;
    this.list.classList.toggle("is-stage", isChain);
    this.speed.hidden = isChain;
    setText(this.rate, member.tokens_per_second == null ? "–" : count(member.tokens_per_second));
    this.fast.style.width = `${fastest ? (100 * (member.tokens_per_second ?? 0)) / fastest : 0}%`;
    const said = {
      Layers: stage && layers(stage),
      Step: stage && count(stage.step),
      "Under way": stage?.micro_batches ? stage.under_way : undefined,
      Waits: stage?.waited == null ? undefined : `${Math.round(100 * stage.waited)} %`,
      Loss: member.loss?.toFixed(4),
      Cosine: member.cosine?.toFixed(2),
      Gradient: member.gradient_norm?.toPrecision(3),
      Memory: member.memory_bytes ? bytes(member.memory_bytes) : undefined,
      "At once": member.micro_batch || undefined,
      Lease: member.lease_seconds == null ? undefined : duration(member.lease_seconds),
      Rounds: member.num_rounds,
      Late: member.num_late,
    };
    const told = isChain ? STAGE_FACTS : FACTS;
    for (const [name, value] of this.facts) {
      setText(value, `${said[name] ?? "–"}`);
      value.parentElement.hidden = !told.includes(name);
    }
    this.facts.get("Late").classList.toggle("is-warned", member.num_late > 0);
    setText(this.versions, ["torch", "transformers"].flatMap((name) => (member.versions[name] ? [`${name} ${member.versions[name]}`] : [])).join(" · "));
    this.versions.hidden = !this.versions.textContent;
    setText(this.reason, member.reason);
    this.reason.hidden = !member.reason;
  }
}
