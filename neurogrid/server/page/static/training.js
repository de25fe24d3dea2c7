// The page of a training run: how far it is, whether it learns, who takes part, what happened.

import { ask, setKey } from "./api.js";
import { Curves, smooth } from "./curves.js";
import { KeyedList, byId, html, setAttributes, setText } from "./dom.js";
import { joined, wantedAfter } from "./figures.js";
import { clock, count, duration, perSecond, remaining } from "./format.js";
import { Entry } from "./log.js";
import { Member, StageHead, grouped } from "./members.js";
import { ROUND_HEADS, Round, STEP_HEADS, drawGrid, newest } from "./rounds.js";
import { always } from "./storage.js";

const INTERVAL = 1000;
const HIDDEN_INTERVAL = 5000;
const MAX_DELAY = 5000;
const VERIFY_INTERVAL = 5000;
const SILENCE = 15000;
const MAX_LOG = 40;
const MAX_VERDICTS = 8;
// Losses from which on they are drawn smoothed, too.
const MANY = 30;
const PHASES = { waiting: "Waiting", training: "Training", finishing: "Finishing", ended: "Ended" };
// As the page of a cluster colours them.
const DOTS = { waiting: "waiting", training: "ready", finishing: "transferring", ended: "ended" };

let status = null;
let lines = [];
let verdict = null;
let whole = null;

// ---------------------------------------------------------------- light and dark, the key

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  always.set("theme", root.dataset.theme);
});

function askForKey() {
  return new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        if (input.value) setKey(input.value);
        input.value = "";
        resolve();
      },
      { once: true },
    );
  });
}

// ---------------------------------------------------------------- the curves

let isByTime = always.get("training-by", "step") === "time";
const curves = new Curves(byId("chart"), (x, here) => {
  const where = x === null ? "" : isByTime ? `after ${duration(x)}` : `step ${count(x)}`;
  setText(byId("readout"), [where, ...here.map((one) => `${one.name} ${one.value.toFixed(4)}`)].filter(Boolean).join(" · "));
});

function choose(byTime) {
  isByTime = byTime;
  always.set("training-by", byTime ? "time" : "step");
  setAttributes(byId("by-step"), { "aria-pressed": `${!byTime}` });
  setAttributes(byId("by-time"), { "aria-pressed": `${byTime}` });
  drawCurves();
}

byId("by-step").addEventListener("click", () => choose(false));
byId("by-time").addEventListener("click", () => choose(true));

function drawCurves() {
  const at = isByTime ? "seconds" : "step";
  const pointsOf = (name) => lines.flatMap((line) => (line[name] != null && line[at] != null ? [[line[at], line[name]]] : []));
  const losses = pointsOf("loss");
  const held = pointsOf("eval_loss");
  const isSmoothed = losses.length >= MANY;
  const series = [
    { name: "loss", className: isSmoothed ? "is-loss is-faint" : "is-loss", points: losses },
    ...(isSmoothed ? [{ name: "smoothed", className: "is-loss", points: smooth(losses) }] : []),
    { name: "held-out loss", className: "is-held", points: held, hasDots: held.length < 60 },
  ];
  curves.update(series, isByTime ? duration : count, (value) => `${+value.toPrecision(3)}`);
  byId("legend").replaceChildren(
    ...series
      .filter((one) => one.points.length && !one.className.includes("is-faint"))
      .map((one) => html("span", { class: `legend-item ${one.className}` }, one.name === "smoothed" ? "loss, smoothed" : one.name)),
  );
}

// ---------------------------------------------------------------- the run

const members = new KeyedList(byId("members"), ({ member, head }) => (head ? `stage ${head.number}` : member.peer_id), ({ head }) => (head ? new StageHead() : new Member()));
const rounds = new KeyedList(byId("rounds-body"), ({ round }) => round.round, () => new Round());
const log = new KeyedList(byId("log"), ({ event }) => `${event.number} ${event.at}`, () => new Entry());
const alarms = new KeyedList(byId("alarms"), (alarm) => `${alarm.kind} ${alarm.seat}`, () => new Line("notice"));
const verdicts = new KeyedList(byId("verdicts"), (one) => `${one.at} ${one.seat} ${one.kind}`, () => new Line("checkpoint"));
const checkpoints = new KeyedList(byId("checkpoints"), (one) => one.step, () => new Line("checkpoint"));

class Line {
  constructor(kind) {
    this.element = html("li", { class: kind });
  }

  update({ text }) {
    setText(this.element, text);
  }
}

function worthsTold(worths) {
  const gains = worths.map((one) => one.gain);
  const watched = worths.filter((one) => one.is_watched).map((one) => `seat ${one.seat}`);
  const told = `a member's results alone lower the loss by ${Math.min(...gains).toFixed(4)} to ${Math.max(...gains).toFixed(4)}`;
  return watched.length ? `${told}, ${watched.join(", ")} apart from the others` : told;
}

function showChecks(checks) {
  byId("checks").hidden = !checks;
  if (!checks) return;
  const parts = [`${count(checks.num_held)} of ${count(checks.num_made)} results that were computed again hold`];
  if (checks.num_open) parts.push(`${count(checks.num_open)} judged now`);
  if (checks.num_trials) parts.push(`${count(checks.num_trials)} on trial`);
  if (checks.worths.length) parts.push(worthsTold(checks.worths));
  setText(byId("checks-text"), parts.join(" · "));
  verdicts.update(checks.last.slice(-MAX_VERDICTS).reverse().map((one) => ({ ...one, text: `${clock(one.at)} ${one.text}` })));
}

function showProgress() {
  const hasPart = status.part != null;
  byId("progress").hidden = !hasPart;
  if (hasPart) {
    const percent = Math.floor(100 * status.part);
    byId("progress-done").style.width = `${100 * status.part}%`;
    setAttributes(byId("progress"), { "aria-valuenow": percent });
  }
  const steps = status.is_chain ? [`Step ${count(status.step)}`] : [`Round ${count(status.round)}`, `step ${count(status.step)}`];
  const parts = [...steps, `${count(status.tokens)} tokens`, `${duration(status.seconds)} so far`];
  if (status.phase === "training" && status.remaining_seconds) parts.push(remaining(status.remaining_seconds));
  if (hasPart) parts.push(`${Math.floor(100 * status.part)} %`);
  setText(byId("progress-text"), parts.join(" · "));
}

function takesPart(member) {
  return (status.is_chain ? member.stage : member.seat) != null;
}

/** Those that take part; of a chain its stages, whether they are one member or several. */
function countParts(members) {
  const found = members.filter(takesPart);
  return status.is_chain ? new Set(found.map((one) => one.stage.number)).size : found.length;
}

function showFigures() {
  setText(byId("loss"), status.loss?.toFixed(3) ?? "–");
  const first = lines.find((line) => line.loss != null)?.loss;
  setText(byId("loss-note"), first != null && status.loss != null ? `at first ${first.toFixed(3)}` : "");
  setText(byId("eval-loss"), status.eval_loss?.toFixed(3) ?? "–");
  const held = lines.findLast((line) => line.eval_loss != null);
  setText(byId("eval-note"), held ? `after ${status.is_chain ? "step" : "round"} ${count(held.round)}` : "not yet");
  setText(byId("rate"), status.tokens_per_second ? (status.tokens_per_second >= 1000 ? count(status.tokens_per_second) : perSecond(status.tokens_per_second)) : "–");
  const what = status.is_chain ? "stage" : "member";
  const there = countParts(status.members.filter((one) => one.state !== "away"));
  setText(byId("rate-note"), `of ${there} ${what}${there === 1 ? "" : "s"}`);
  const samples = status.samples;
  if (samples) {
    const all = samples.available + samples.assigned + samples.used;
    setText(byId("samples"), `${all ? Math.floor((100 * samples.used) / all) : 0} %`);
    setText(byId("samples-note"), `of epoch ${samples.epoch + 1}: ${count(samples.used)} of ${count(all)}, ${count(samples.assigned)} assigned`);
  }
}

function showVerdict() {
  if (!verdict) return;
  const agreed = verdict.hash_agreement_rate;
  const same = agreed == null ? "" : agreed === 1 ? " All have the same weights." : ` ${Math.round(100 * agreed)} % have the same weights.`;
  setText(byId("verdict"), `${verdict.training_verified ? "It learns" : "Whether it learns is not clear"}: ${verdict.reason}.${same}`);
  byId("verdict").dataset.severity = verdict.training_verified ? "good" : "info";
}

const GOES = { falling: "falls", rising: "rises", flat: "stays", unclear: "falls or rises, its noise is larger" };

/** Where figures go, and who has other weights: one line. */
function showWhole() {
  if (!whole) return;
  const parts = [];
  for (const [name, figure] of [["the loss", whole.loss], ["the rate", whole.tokens_per_second], ["the gradient norm", whole.gradient_norm]]) {
    const { direction, num } = figure.trend;
    if (GOES[direction]) parts.push(`${name} ${GOES[direction]} (${num} rounds)`);
  }
  for (const one of whole.agreement.differing) parts.push(`${one.name} has other weights since round ${count(one.since_round)}`);
  setText(byId("whole"), parts.length ? `Lately: ${parts.join(" · ")}.` : "");
}

function showRounds() {
  const shown = status.rounds;
  setText(byId("round-count"), status.round ? count(status.round) : "");
  // Of a chain each step has all that there is: who took part says nothing.
  for (const id of ["rounds-scroll", "grid", "grid-key"]) byId(id).hidden = !shown.length || status.is_chain;
  byId("rounds").hidden = !shown.length;
  byId("no-rounds").hidden = shown.length > 0;
  if (!shown.length) return;
  const scroll = byId("rounds-scroll");
  const isAtEnd = scroll.scrollLeft + scroll.clientWidth >= scroll.scrollWidth - 4;
  if (!status.is_chain) drawGrid(byId("grid"), shown);
  if (isAtEnd) scroll.scrollLeft = scroll.scrollWidth;
  rounds.update(newest(shown).map((round) => ({ round, isChain: status.is_chain })));
}

/** What a chain has are stages and steps, where other runs have members and rounds. */
function showNames(isChain) {
  setText(byId("member-title"), isChain ? "Stages" : "Members");
  setText(byId("round-title"), isChain ? "Steps" : "Rounds");
  setText(byId("no-rounds"), isChain ? "No step yet." : "No round yet.");
  const heads = isChain ? STEP_HEADS : ROUND_HEADS;
  [...byId("round-heads").children].forEach((head, index) => {
    setText(head, heads[index] ?? "");
    head.hidden = index >= heads.length;
  });
}

let drawnRound = "";

function draw() {
  setText(byId("name"), status.name);
  document.title = `${status.name} · NeuroGrid training`;
  const isStuck = status.phase === "training" && status.alarms.length > 0;
  byId("phase").dataset.phase = isStuck ? "mending" : (DOTS[status.phase] ?? "waiting");
  setText(byId("phase-text"), status.waits || (status.phase === "ended" ? `Ended: ${status.reason}` : (PHASES[status.phase] ?? status.phase)));
  showProgress();
  showFigures();
  showVerdict();
  showWhole();
  alarms.update(status.alarms);
  const fastest = Math.max(0, ...status.members.map((one) => one.tokens_per_second ?? 0));
  members.update(grouped(status.members).map((item) => ({ ...item, fastest, isChain: status.is_chain })));
  setText(byId("member-count"), `${countParts(status.members) || ""}`);
  showNames(status.is_chain);
  byId("no-members").hidden = status.members.length > 0;
  const last = status.rounds.at(-1);
  const now = `${last?.round} ${last?.figures.loss} ${last?.figures.eval_loss} ${status.rounds.length}`;
  if (now !== drawnRound) {
    drawnRound = now;
    showRounds();
  }
  const kept = status.checkpoints.slice(-4).reverse();
  checkpoints.update(kept.map((one) => ({ step: one.step, text: `step ${count(one.step)}, ${status.is_chain ? "" : `after round ${one.round}, `}at ${clock(one.at)}` })));
  byId("no-checkpoints").hidden = kept.length > 0;
  showChecks(status.checks);
  log.update(status.events.slice(-MAX_LOG).reverse().map((event) => ({ event })));
  byId("no-log").hidden = status.events.length > 0;
}

// ---------------------------------------------------------------- what the server knows

async function get(path) {
  const response = await ask(path, { signal: AbortSignal.timeout(SILENCE) });
  return response.json();
}

async function takeFigures() {
  const after = wantedAfter(lines, status);
  if (after === null) return;
  const { metrics } = await get(`/v1/training/metrics?after=${after}`);
  lines = joined(lines, after, metrics);
  drawCurves();
}

let verifiedAt = 0;

async function look() {
  status = await get("/v1/training/status");
  await takeFigures();
  if (performance.now() - verifiedAt > VERIFY_INTERVAL || !verdict) {
    [verdict, whole] = await Promise.all([get("/v1/training/verify"), get("/v1/training/global")]);
    verifiedAt = performance.now();
  }
  byId("lost").hidden = true;
  document.body.classList.remove("is-lost");
  draw();
}

async function follow() {
  let delay = INTERVAL;
  for (;;) {
    try {
      await look();
      delay = document.hidden ? HIDDEN_INTERVAL : INTERVAL;
    } catch (error) {
      if (error.status === 401) {
        await askForKey();
        continue;
      }
      const isOver = status?.phase === "ended";
      setText(byId("lost"), isOver ? "The run is over, and its leader has ended. This is what it said last." : "No connection to the leader. Trying again …");
      byId("lost").hidden = false;
      document.body.classList.add("is-lost");
      if (!isOver) {
        byId("phase").dataset.phase = "lost";
        setText(byId("phase-text"), "Not connected");
      }
      delay = Math.min(delay * 1.6, MAX_DELAY);
    }
    await new Promise((resolve) => setTimeout(resolve, delay));
  }
}

choose(isByTime);
follow();
