// Puts the page together: chat, cluster, settings, tabs, light and dark.

import { currentKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { KeyedList, byId, setText } from "./dom.js";
import { duration, perSecond } from "./format.js";
import { History, HistoryDialog } from "./history.js";
import { Entry, entries, lastLoss } from "./log.js";
import { Models } from "./models.js";
import { Picture } from "./picture.js";
import { drawBars, drawLine } from "./spark.js";
import { follow } from "./status.js";
import { always } from "./storage.js";
import { Worker } from "./workers.js";

const PHASES = {
  reading: "Reading the model",
  waiting: "Waiting for workers",
  transferring: "Sending weights",
  ready: "Ready",
  mending: "Mending",
};
const MAX_LOG = 40;
// For the model that comes with NeuroGrid, which knows the Python reference; and for any other.
const SUGGESTIONS = {
  embedded: ["A function definition", "The for statement", "A class definition"],
  other: ["Explain why the sky is blue", "Write a haiku about a long journey", "What is a prime number?"],
};

let status = null;
let isConnected = false;

// ---------------------------------------------------------------- settings and key

const settingsDialog = byId("settings");
const temperature = byId("temperature");
const maxTokens = byId("max-tokens");
const systemPrompt = byId("system-prompt");
const apiKey = byId("api-key");
const tools = byId("tools");
const keepsHistory = byId("keeps-history");
const history = new History();

function showTemperature() {
  setText(byId("temperature-value"), Number(temperature.value).toFixed(2));
}

temperature.value = always.get("temperature", "0.7");
maxTokens.value = always.get("max-tokens", "256");
systemPrompt.value = always.get("system-prompt", "");
tools.value = always.get("tools", "");
/** The tools as the API takes them; null for none, or where what is written is no list. */
function toolsOf(text) {
  if (!text.trim()) return null;
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) && list.length ? list : null;
  } catch {
    return null;
  }
}

function checkTools() {
  const isWrong = tools.value.trim() && toolsOf(tools.value) === null;
  tools.setCustomValidity(isWrong ? "A list in JSON is due, as `tools` of the API" : "");
}

showTemperature();
tools.addEventListener("input", checkTools);
temperature.addEventListener("input", showTemperature);
byId("settings-button").addEventListener("click", () => {
  apiKey.value = currentKey();
  keepsHistory.checked = history.isOn; // another tab may have switched it
  settingsDialog.showModal();
});
settingsDialog.addEventListener("close", () => {
  always.set("temperature", temperature.value);
  if (maxTokens.validity.valid) always.set("max-tokens", maxTokens.value);
  else maxTokens.value = always.get("max-tokens", "256");
  always.set("system-prompt", systemPrompt.value.trim() || null);
  if (!tools.validity.valid) tools.value = always.get("tools", "");
  checkTools();
  always.set("tools", tools.value.trim() || null);
  if (keepsHistory.checked !== history.isOn) history.turn(keepsHistory.checked);
  if (apiKey.value !== currentKey()) setKey(apiKey.value);
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

let asking = null;

/** Ask for the key, once for all who want it. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    if (!dialog.open) dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        if (input.value) setKey(input.value);
        input.value = "";
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

// ---------------------------------------------------------------- views, light and dark

const tabs = [byId("tab-chat"), byId("tab-cluster")];
const narrow = matchMedia("(max-width: 899px)");

function show(view) {
  document.body.dataset.view = view;
  for (const tab of tabs) {
    const isShown = tab.id === `tab-${view}`;
    tab.setAttribute("aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
  }
}

function setPanels() {
  for (const tab of tabs) {
    const panel = byId(tab.getAttribute("aria-controls"));
    if (narrow.matches) {
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", tab.id);
    } else {
      panel.removeAttribute("role");
      panel.removeAttribute("aria-labelledby");
    }
  }
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => show(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(index + 1) % tabs.length];
    show(other.id.slice(4));
    other.focus();
  });
});
narrow.addEventListener("change", setPanels);
setPanels();

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  always.set("theme", root.dataset.theme);
});

// ---------------------------------------------------------------- the cluster

const picture = new Picture(byId("picture"));
const workers = new KeyedList(byId("workers"), ({ peer }) => peer.peer_id, () => new Worker());
const log = new KeyedList(byId("log"), ({ event }) => `${event.number} ${event.at}`, () => new Entry());
const ROLES = ["stage", "replica", "spare"];

function order(peer) {
  return (peer.health === "lost" ? 1e6 : 0) + 1e4 * ROLES.indexOf(peer.role) + (peer.stage ?? 0);
}

function showFigures() {
  setText(byId("rate"), perSecond(status.tokens_per_second));
  drawLine(byId("rate-spark"), status.tokens_history);
  const firsts = Object.values(status.requests).flatMap((one) => one.time_to_first_token ?? []);
  setText(byId("first-token"), firsts.length ? duration(firsts.at(-1)) : "–");
  drawBars(byId("first-spark"), firsts);
  setText(byId("sessions"), `${status.num_running}`);
  const waiting = status.num_waiting ? `${status.num_waiting} waiting` : "none waiting";
  setText(byId("sessions-note"), status.num_failed ? `${waiting}, ${status.num_failed} failed` : waiting);
}

function showWorkers() {
  const peers = Object.values(status.peers).sort((one, other) => order(one) - order(other));
  workers.update(peers.map((peer) => ({ peer, stages: status.stages })));
  const there = peers.filter((peer) => peer.health !== "lost").length;
  setText(byId("worker-count"), `${there || status.workers_found || ""}`);
  byId("no-workers").hidden = peers.length > 0 || status.workers_found > 0;
  byId("workers-asked").hidden = peers.length > 0 || !status.workers_found;
}

function draw() {
  setText(byId("model"), status.model);
  byId("phase").dataset.phase = status.phase;
  setText(byId("phase-text"), PHASES[status.phase] ?? status.phase);
  byId("phase").title = status.phase_text;
  showFigures();
  picture.update(status);
  showWorkers();
  const loss = lastLoss(status);
  setText(byId("notice"), loss);
  byId("notice").hidden = !loss;
  byId("notice").dataset.severity = status.phase === "mending" ? "error" : "warning";
  log.update(entries(status, MAX_LOG));
  byId("no-log").hidden = status.events.length > 0;
}

let isDrawing = false;
let suggested = "";

function onStatus(next) {
  status = next;
  isConnected = true;
  byId("lost").hidden = true;
  document.body.classList.remove("is-lost");
  if (status.model && suggested !== status.model) {
    suggested = status.model;
    models.look();
    chat.suggest(status.model === "embedded" ? SUGGESTIONS.embedded : SUGGESTIONS.other);
    setText(
      byId("welcome-text"),
      status.model === "embedded"
        ? "The small model that comes with NeuroGrid: it knows the Python reference by heart, and nothing else."
        : `${status.model}, its ${status.total_layers} layers spread over the machines of this cluster.`,
    );
  }
  if (isDrawing) return;
  isDrawing = true;
  // Not by requestAnimationFrame: a page in the background would keep what it has to draw.
  setTimeout(() => {
    isDrawing = false;
    draw();
  }, 0);
}

function onLost(error) {
  isConnected = false;
  const banner = byId("lost");
  const reason = error === null || error instanceof TypeError || error.name === "AbortError" ? "" : ` (${error.message})`;
  setText(banner, `No connection to the coordinator${reason}. Trying again …`);
  banner.hidden = false;
  document.body.classList.add("is-lost");
  byId("phase").dataset.phase = "lost";
  setText(byId("phase-text"), "Not connected");
}

const models = new Models(
  () => status?.model ?? "",
  () => chat.attachments.draw(),
);

const chat = new Chat({
  settings: () => ({
    temperature: Number(temperature.value),
    maxTokens: Number(maxTokens.value),
    system: systemPrompt.value.trim(),
    tools: toolsOf(tools.value),
  }),
  model: () => models.name,
  status: () => (isConnected ? status : null),
  onKey: askForKey,
  history,
  takesImages: () => models.takesImages,
});
new HistoryDialog(history, { open: (one) => chat.open(one), current: () => chat });

if (!narrow.matches) byId("prompt").focus();
follow({ onStatus, onLost, onKey: askForKey, models });
