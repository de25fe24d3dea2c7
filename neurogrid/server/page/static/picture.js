// The cluster as a ring: the coordinator on top, the stages clockwise in their order, what stands by below. Activations
// go round; weights go across. It is built anew when the plan changes, and brought up to date in place between.

import { perSecond, rate, duration, layers, nameOf, shortId, remaining } from "./format.js";
import { setAttributes, setText, svg } from "./dom.js";

const WIDTH = 400;
const RING = { x: WIDTH / 2, y: 172, rx: 122, ry: 104 };
const MAX_STANDBY = 7;
const MAX_NAME = 16;
// What is written in the middle reaches that far from it.
const CENTRE = 64;

export function stageColour(number) {
  return number ? `var(--stage-${((number - 1) % 7) + 1})` : "var(--quiet)";
}

function radiusFor(numNodes) {
  if (numNodes <= 4) return 33;
  if (numNodes <= 6) return 28;
  if (numNodes <= 9) return 21;
  return Math.max(Math.min(500 / numNodes / 2.6, 18), 5);
}

/** Where the coordinator and each stage are: evenly, but with room for the coordinator where the stages are many. */
function anglesFor(numStages, radius) {
  const room = Math.max((2 * Math.PI) / (numStages + 1), (32 + radius) / RING.rx);
  const step = numStages > 1 ? (2 * Math.PI - 2 * room) / (numStages - 1) : 0;
  return [-Math.PI / 2, ...Array.from({ length: numStages }, (_, index) => -Math.PI / 2 + room + index * step)];
}

function at(angle, more = 0) {
  return [RING.x + (RING.rx + more) * Math.cos(angle), RING.y + (RING.ry + more) * Math.sin(angle)];
}

/** The way that `pointAt` goes from 0 to 1, without what the nodes at both ends cover. */
function path(pointAt, gap) {
  const ends = [pointAt(0), pointAt(1)];
  const points = [];
  const steps = 48;
  for (let step = 0; step <= steps; step += 1) {
    const point = pointAt(step / steps);
    const isFree = ends.every(([x, y]) => Math.hypot(point[0] - x, point[1] - y) >= gap);
    if (isFree) points.push(point.map((value) => value.toFixed(1)).join(" "));
  }
  return points.length > 1 ? `M${points.join("L")}` : "";
}

/** The part of the ring from one angle to another. */
function arc(from, to, gap) {
  return path((share) => at(from + (to - from) * share), gap);
}

/** The way from one node to another inside of the ring: straight, but around what is written in the middle. */
function chord([x1, y1], [x2, y2], gap) {
  const length = Math.hypot(x2 - x1, y2 - y1) || 1;
  const [dx, dy] = [(x2 - x1) / length, (y2 - y1) / length];
  const aside = (RING.x - x1) * dy - (RING.y - y1) * dx; // how far the middle is from the straight line
  const bend = Math.max(CENTRE - Math.abs(aside), 0) * (aside < 0 ? -1 : 1);
  // A quadratic curve comes half as far out as its control point.
  const [cx, cy] = [(x1 + x2) / 2 - 2 * bend * dy, (y1 + y2) / 2 + 2 * bend * dx];
  const curve = (from, by, to, share) => (1 - share) ** 2 * from + 2 * share * (1 - share) * by + share ** 2 * to;
  return path((share) => [curve(x1, cx, x2, share), curve(y1, cy, y2, share)], gap);
}

/** A part of a circle, drawn as a dash of that length. */
function dash(radius, from, share) {
  const around = 2 * Math.PI * radius;
  return { "stroke-dasharray": `${Math.max(share, 0) * around} ${around}`, "stroke-dashoffset": -from * around };
}

export class Picture {
  constructor(element) {
    this.element = element;
    this.shape = "";
    this.nodes = new Map();
    this.links = [];
  }

  update(status) {
    const peers = status.peers ?? {};
    const stages = status.stages ?? [];
    const used = new Set(stages.map((stage) => stage.peer_id));
    const others = Object.values(peers).filter((peer) => !used.has(peer.peer_id) || peer.health === "lost");
    const shape = JSON.stringify([
      status.peer_id,
      stages.map((stage) => [stage.peer_id, stage.layers]),
      others.map((peer) => [peer.peer_id, peer.health === "lost", peer.layers_assigned]),
    ]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(status, stages, others);
    }
    this.refresh(status, peers, stages);
  }

  build(status, stages, others) {
    this.nodes.clear();
    this.links = [];
    this.weights = [];
    const number = stages.length + 1;
    const radius = radiusFor(number);
    const angles = anglesFor(stages.length, radius);
    const lines = svg("g", { class: "lines" });
    const things = svg("g", { class: "nodes" });

    if (stages.length === 0) {
      lines.append(svg("ellipse", { class: "ring-empty", cx: RING.x, cy: RING.y, rx: RING.rx, ry: RING.ry }));
    }
    stages.forEach((stage, index) => {
      const source = index === 0 ? status.peer_id : stages[index - 1].peer_id;
      this.addLink(lines, source, stage.peer_id, angles[index], angles[index + 1], radius, number, stageColour(index));
    });
    if (stages.length > 0) {
      const last = stages[stages.length - 1].peer_id;
      this.addLink(lines, last, status.peer_id, angles[number - 1], angles[0] + 2 * Math.PI, radius, number, stageColour(stages.length));
    }
    stages.forEach((stage, index) => {
      const path = svg("path", { class: "weights", d: chord(at(angles[0]), at(angles[index + 1]), radius + 10) });
      path.style.setProperty("--stage", stageColour(stage.number));
      lines.append(path);
      this.weights.push({ path, peerId: stage.peer_id });
    });

    things.append(this.coordinator(at(angles[0]), Math.max(radius, 24)));
    stages.forEach((stage, index) => things.append(this.stage(stage, angles[index + 1], radius)));
    const lowest = Math.max(0, ...angles.slice(1).map((angle) => at(angle)[1] + radius + (radius >= 28 ? 36 : 6)));
    const bottom = Math.max(lowest, RING.y + RING.ry + 40);
    others.slice(0, MAX_STANDBY).forEach((peer, index) => {
      const shown = Math.min(others.length, MAX_STANDBY);
      const step = Math.min(96, (WIDTH - 60) / Math.max(shown, 1));
      const x = WIDTH / 2 + (index - (shown - 1) / 2) * step;
      things.append(this.standby(peer, x, bottom + 26, stages, others.length - shown, index === shown - 1));
    });

    this.centre = svg("text", { class: "centre", x: RING.x, y: RING.y + 3 });
    this.centreNote = svg("text", { class: "centre-note", x: RING.x, y: RING.y + 22 });
    const height = bottom + (others.length ? 70 : 4);
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    this.element.replaceChildren(lines, things, this.centre, this.centreNote);
  }

  addLink(parent, source, target, from, to, radius, number, colour) {
    const d = arc(from, to, radius + 9);
    const flow = svg("path", { class: "flow", d });
    flow.style.setProperty("--stage", colour);
    const [x, y] = at((from + to) / 2, 14);
    const side = Math.cos((from + to) / 2);
    const anchor = Math.abs(side) < 0.3 ? "middle" : side > 0 ? "start" : "end";
    const below = Math.sin((from + to) / 2) > 0.5 ? 8 : 0;
    const label = svg("text", { class: "link-label", x, y: y + below, "text-anchor": anchor });
    const more = svg("text", { class: "link-label", x, y: y + below + 14, "text-anchor": anchor });
    parent.append(svg("path", { class: "link", d }), flow);
    if (number <= 6) parent.append(label, more);
    this.links.push({ source, target, flow, label, more });
  }

  coordinator([x, y], radius) {
    const group = svg("g", { class: "node coordinator", transform: `translate(${x} ${y})` });
    group.append(
      svg("circle", { class: "disc", r: radius }),
      svg("path", { class: "glyph", d: "M0-9 10 7H-10Z" }),
      svg("circle", { class: "glyph-dot", cy: -9, r: 3.5 }),
      svg("circle", { class: "glyph-dot", cx: 10, cy: 7, r: 3.5 }),
      svg("circle", { class: "glyph-dot", cx: -10, cy: 7, r: 3.5 }),
      svg("text", { class: "node-name", y: -radius - 10 }, "Coordinator"),
    );
    return group;
  }

  stage(stage, angle, radius) {
    const [x, y] = at(angle);
    const group = svg("g", { class: "node stage", transform: `translate(${x} ${y})` });
    group.style.setProperty("--stage", stageColour(stage.number));
    const width = Math.min(6, radius * 0.4);
    const ring = radius - width / 2;
    group.style.setProperty("--ring-width", `${width}px`);
    const last = stage.layers.stop - 1;
    const inside = stage.layers.start === last ? `${last}` : `${stage.layers.start}–${last}`;
    const node = {
      group,
      ring,
      title: svg("title"),
      others: svg("circle", { class: "arc-others", r: ring, transform: "rotate(-90)" }),
      own: svg("circle", { class: "arc-own", r: ring, transform: "rotate(-90)" }),
      note: svg("text", { class: "node-note" }),
    };
    group.append(
      node.title,
      svg("circle", { class: "disc", r: Math.max(radius - 7, radius * 0.5) }),
      svg("circle", { class: "track", r: ring }),
      node.others,
      node.own,
    );
    if (radius >= 28) {
      const size = inside.length > 4 ? " is-long" : "";
      group.append(
        svg("text", { class: `node-layers${size}`, y: 1 }, inside),
        svg("text", { class: "node-small", y: 14 }, "layers"),
      );
    } else if (radius >= 12) group.append(svg("text", { class: "node-layers is-long", y: 4.5 }, `${stage.number}`));
    if (radius >= 28) {
      node.note.setAttribute("y", radius + 32);
      group.append(svg("text", { class: "node-name", y: radius + 17 }, `Stage ${stage.number}`), node.note);
    }
    this.nodes.set(stage.peer_id, node);
    return group;
  }

  standby(peer, x, y, stages, hidden, isLast) {
    const isLost = peer.health === "lost";
    const stage = stages.find(
      (one) => peer.layers_assigned.start <= one.layers.start && one.layers.stop <= peer.layers_assigned.stop,
    );
    const group = svg("g", { class: `node standby${isLost ? " is-lost" : ""}`, transform: `translate(${x} ${y})` });
    group.style.setProperty("--stage", isLost ? "var(--bad)" : stageColour(stage?.number));
    const note = svg("text", { class: "node-note", y: 29 });
    group.append(svg("title", {}, `${peer.name} ${shortId(peer.peer_id)}`), svg("circle", { class: "disc", r: 12 }));
    if (isLost) group.append(svg("path", { class: "cross", d: "M-4-4 4 4M4-4-4 4" }));
    const own = svg("circle", { class: "arc-own", r: 12, transform: "rotate(-90)" });
    if (!isLost) group.append(own);
    group.append(note);
    const has = peer.layers_assigned.stop > peer.layers_assigned.start;
    const text = isLost ? "lost" : has ? layers(peer.layers_assigned).replace(/layers? /, "") : "spare";
    setText(note, isLast && hidden ? `${text} +${hidden}` : text);
    const doing = svg("text", { class: "node-note", y: 42 });
    group.append(doing);
    this.nodes.set(peer.peer_id, { group, own, doing, has, isStandby: true });
    return group;
  }

  refresh(status, peers, stages) {
    this.labels = labelsOf(peers);
    const links = status.links ?? {};
    const busiest = Math.max(0, ...Object.values(links).map((link) => link.activations_per_second));
    for (const { source, target, flow, label, more } of this.links) {
      const link = links[`${source}>${target}`];
      // Within the coordinator's own process nothing is counted: as much as goes on from there.
      const passes = source === target ? busiest : (link?.activations_per_second ?? 0);
      const isBusy = status.num_running > 0 && passes > 0.2;
      flow.classList.toggle("is-on", isBusy);
      flow.style.setProperty("--period", `${Math.max(0.22, 0.9 / (1 + passes / 30)).toFixed(2)}s`);
      const texts = [];
      if (link?.latency != null) texts.push(duration(link.latency));
      if (isBusy && link) texts.push(`${link.is_counted ? "" : "≈ "}${rate(link.bytes_per_second)}`);
      setText(label, texts[0] ?? "");
      setText(more, texts[1] ?? "");
    }
    for (const { path, peerId } of this.weights) {
      const peer = peers[peerId];
      const flowing = (links[`${status.peer_id}>${peerId}`]?.weight_bytes_per_second ?? 0) > 0;
      path.classList.toggle("is-on", peer?.health === "receiving" && flowing);
    }
    for (const stage of stages) {
      const peer = peers[stage.peer_id];
      const node = this.nodes.get(stage.peer_id);
      if (node && !node.isStandby) this.refreshStage(node, stage, peer);
    }
    for (const [peerId, node] of this.nodes) {
      const peer = peers[peerId];
      if (!node.isStandby || !peer) continue;
      const transfer = peer.transfer;
      const share = peer.health === "receiving" && transfer ? came(transfer) : 1;
      setAttributes(node.own, dash(12, 0, share));
      node.group.classList.toggle("is-receiving", peer.health === "receiving");
      let doing = node.has ? "stands by" : "";
      if (peer.health === "lost") doing = this.labels.get(peerId);
      else if (peer.health === "receiving") doing = "getting layers";
      else if (peer.num_sessions) doing = peer.num_sessions === 1 ? "1 session" : `${peer.num_sessions} sessions`;
      setText(node.doing, doing);
    }
    this.refreshCentre(status, peers, stages);
    setAttributes(this.element, { "aria-label": describe(status, peers, stages) });
  }

  refreshStage(node, stage, peer) {
    const isThere = peer && peer.health !== "lost";
    const isReceiving = peer?.health === "receiving";
    node.group.classList.toggle("is-missing", !stage.is_ready && !isReceiving);
    node.group.classList.toggle("is-receiving", Boolean(isReceiving));
    if (isReceiving && peer.transfer) {
      setAttributes(node.others, dash(node.ring, 0, 0));
      setAttributes(node.own, dash(node.ring, 0, came(peer.transfer)));
    } else if (isThere && peer.memory_total_bytes) {
      const used = (peer.memory_used_bytes ?? 0) / peer.memory_total_bytes;
      const own = Math.max(peer.memory_stage_bytes / peer.memory_total_bytes, 0.012);
      setAttributes(node.others, dash(node.ring, 0, used));
      setAttributes(node.own, dash(node.ring, used, Math.min(own, 1 - used)));
    } else {
      setAttributes(node.others, dash(node.ring, 0, 0));
      setAttributes(node.own, dash(node.ring, 0, isThere ? 1 : 0));
    }
    let note = this.labels.get(stage.peer_id) ?? shortId(stage.peer_id);
    if (isReceiving && peer.transfer) {
      const percent = Math.floor(100 * came(peer.transfer));
      const speed = peer.transfer.bytes_per_second;
      if (percent === 100) note = "loading its layers";
      else note = percent || speed ? `${percent} % · ${rate(speed)}` : "getting ready";
    } else if (!stage.is_ready && peer) note = "not ready";
    else note = stepOf(peer) || note;
    setText(node.note, note);
    setText(node.title, `Stage ${stage.number}, ${layers(stage.layers)}: ${peer ? nameOf(peer) : ""} ${shortId(stage.peer_id)} ${peer?.address ?? ""}`.trim());
  }

  refreshCentre(status, peers, stages) {
    const missing = stages.filter((stage) => !stage.is_ready);
    if (status.phase === "waiting" || status.phase === "reading") {
      setText(this.centre, status.workers_wanted ? `${status.workers_found} of ${status.workers_wanted}` : "");
      setText(this.centreNote, status.workers_wanted ? "workers are there" : "reading the model");
    } else if (status.phase === "transferring") {
      const transfers = Object.values(peers).flatMap((peer) => (peer.transfer ? [peer.transfer] : []));
      const planned = transfers.reduce((sum, one) => sum + one.planned_bytes, 0);
      const here = transfers.reduce((sum, one) => sum + one.planned_bytes * came(one), 0);
      const left = Math.max(0, ...transfers.map((one) => one.remaining_seconds ?? 0));
      setText(this.centre, planned ? `${Math.floor((100 * here) / planned)} %` : "");
      setText(this.centreNote, left ? remaining(left) : "of the weights");
    } else if (missing.length) {
      setText(this.centre, missing.map((stage) => layers(stage.layers).replace(/layers? /, "")).join(", "));
      setText(this.centreNote, "being placed anew");
    } else if (status.num_running > 0) {
      setText(this.centre, perSecond(status.tokens_per_second));
      setText(this.centreNote, "tokens a second");
    } else {
      setText(this.centre, `${status.total_layers}`);
      setText(this.centreNote, stages.length === 1 ? "layers in 1 stage" : `layers in ${stages.length} stages`);
    }
  }
}

/** How long a decoded token takes it; empty while nobody knows. */
export function stepOf(peer) {
  return !peer || peer.health === "lost" || peer.step_seconds == null ? "" : `${duration(peer.step_seconds)} a token`;
}

export function came(transfer) {
  const here = transfer.sent_bytes + transfer.cached_bytes + transfer.from_workers_bytes;
  return transfer.planned_bytes ? Math.min(here / transfer.planned_bytes, 1) : 1;
}

/** By peer id, what stands beneath a node: its machine's name if it is the only one called so, else the end of its id. */
function labelsOf(peers) {
  const all = Object.values(peers);
  const names = all.map((peer) => peer.machine);
  const isOnly = (name) => name && names.indexOf(name) === names.lastIndexOf(name);
  const shortened = (name) => (name.length > MAX_NAME ? `${name.slice(0, MAX_NAME - 1)}…` : name);
  return new Map(all.map((peer) => [peer.peer_id, isOnly(peer.machine) ? shortened(peer.machine) : shortId(peer.peer_id)]));
}

function describe(status, peers, stages) {
  const parts = stages.map((stage) => {
    const peer = peers[stage.peer_id];
    return `stage ${stage.number}, ${layers(stage.layers)}, on ${peer ? nameOf(peer) : "nobody"}${stage.is_ready ? "" : ", not ready"}`;
  });
  return parts.length ? `The coordinator and its stages: ${parts.join("; ")}` : "The coordinator; no stages yet";
}
