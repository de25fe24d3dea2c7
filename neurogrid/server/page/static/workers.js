// The workers as a list: who they are, what they hold, how fast they are, how their layers come.

import { bytes, duration, flops, layers, nameOf, rate, remaining, shortId, withShortIds } from "./format.js";
import { html, setAttributes, setText } from "./dom.js";
import { came, stageColour, stepOf } from "./picture.js";

const HEALTH = {
  ready: "ready",
  receiving: "getting layers",
  resting: "left alone for a while",
  suspected: "keeps steps waiting",
  leaving: "about to leave",
  lost: "lost",
};

export class Worker {
  constructor() {
    this.badge = html("span", { class: "badge", "aria-hidden": "true" });
    this.name = html("span", { class: "worker-name" });
    this.id = html("code", { class: "worker-id" });
    this.health = html("span", { class: "health" });
    this.role = html("p", { class: "worker-role" });
    this.where = html("p", { class: "worker-where" });
    this.others = html("span", { class: "meter-others" });
    this.own = html("span", { class: "meter-own" });
    this.meter = html("div", { class: "meter", role: "img" }, this.others, this.own);
    this.memory = html("dd");
    this.compute = html("dd");
    this.reads = html("dd");
    this.away = html("dd");
    this.facts = html(
      "dl",
      { class: "facts" },
      fact("Memory", this.memory),
      fact("Compute", this.compute),
      fact("Reads", this.reads),
      fact("Away", this.away),
    );
    this.came = html("span", { class: "meter-own" });
    this.progress = html("div", { class: "meter", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Weights" }, this.came);
    this.transferText = html("p", { class: "transfer-text" });
    this.transfer = html("div", { class: "transfer" }, this.progress, this.transferText);
    this.reason = html("p", { class: "reason" });
    this.element = html(
      "li",
      { class: "worker" },
      html("div", { class: "worker-head" }, this.badge, html("div", { class: "worker-title" }, this.name, this.id), this.health),
      this.role,
      this.where,
      this.meter,
      this.facts,
      this.transfer,
      this.reason,
    );
  }

  update({ peer, stages }) {
    const isLost = peer.health === "lost";
    const stage = peer.stage ?? stages.find((one) => one.replicas.includes(peer.peer_id))?.number;
    this.element.dataset.health = peer.health;
    this.element.dataset.role = peer.role;
    this.element.dataset.peer = peer.peer_id;
    this.element.style.setProperty("--stage", isLost ? "var(--quiet)" : stageColour(stage));
    setText(this.badge, peer.stage ? `${peer.stage}` : peer.role === "replica" ? "+" : "·");
    setText(this.name, nameOf(peer));
    setText(this.id, shortId(peer.peer_id));
    setAttributes(this.id, { title: peer.peer_id });
    setText(this.health, HEALTH[peer.health] ?? peer.health);
    const step = stepOf(peer);
    setText(this.role, [role(peer), step].filter(Boolean).join(" · "));
    setAttributes(this.role, { title: step && `The last took ${duration(peer.last_step_seconds)}` });
    setText(this.where, [peer.machine && peer.name, peer.address].filter(Boolean).join(" · "));
    this.where.hidden = !this.where.textContent;
    this.refreshMemory(peer);
    setText(this.compute, flops(peer.flops));
    setText(this.reads, rate(peer.read_bytes_per_second));
    setText(this.away, duration(peer.latency));
    this.facts.hidden = isLost;
    this.meter.hidden = isLost || !peer.memory_total_bytes;
    this.refreshTransfer(peer);
    setText(this.reason, withShortIds(peer.lost_reason));
    this.reason.hidden = !peer.lost_reason;
  }

  refreshMemory(peer) {
    const total = peer.memory_total_bytes;
    if (!total) {
      setText(this.memory, peer.memory_known ? bytes(peer.memory_free_bytes) : `${bytes(peer.memory_free_bytes)}, assumed`);
      return;
    }
    const others = Math.min(peer.memory_used_bytes ?? 0, total);
    const own = Math.min(peer.memory_stage_bytes, total - others);
    this.others.style.width = `${(100 * others) / total}%`;
    this.own.style.width = `${(100 * own) / total}%`;
    this.own.hidden = own === 0;
    setText(this.memory, `${bytes(others + own)} of ${bytes(total)} used`);
    const label = `Memory: ${bytes(peer.memory_used_bytes)} used by others, ${bytes(own)} for its layers, ${bytes(total - others - own)} free, of ${bytes(total)}`;
    setAttributes(this.meter, { "aria-label": label, title: label });
  }

  refreshTransfer(peer) {
    const transfer = peer.transfer;
    this.transfer.hidden = peer.health !== "receiving" || !transfer;
    if (this.transfer.hidden) return;
    const percent = Math.floor(100 * came(transfer));
    this.came.style.width = `${percent}%`;
    setAttributes(this.progress, { "aria-valuenow": percent });
    const parts = [`${bytes(transfer.planned_bytes * came(transfer))} of ${bytes(transfer.planned_bytes)}`, rate(transfer.bytes_per_second)];
    if (transfer.remaining_seconds) parts.push(remaining(transfer.remaining_seconds));
    if (transfer.cached_bytes) parts.push(`${bytes(transfer.cached_bytes)} were there`);
    if (transfer.from_workers_bytes) parts.push(`${bytes(transfer.from_workers_bytes)} from workers`);
    setText(this.transferText, parts.join(" · "));
  }
}

function fact(name, value) {
  return html("div", {}, html("dt", {}, name), value);
}

function role(peer) {
  const what = layers(peer.layers_assigned);
  if (peer.health === "lost") return peer.stage ? `was stage ${peer.stage}, ${what}` : `had ${what}`;
  if (peer.role === "stage") return `Stage ${peer.stage}, ${what}`;
  if (peer.role === "replica") return `Stands by with ${what}`;
  return "Spare, no layers";
}
