// What the server knows of the cluster, kept up to date: a snapshot, then patches (RFC 7396), for as long as the page is
// open. A connection that ends is made again, with growing pauses.

import { ask, eventsOf } from "./api.js";

const FIRST_DELAY = 500;
const MAX_DELAY = 5000;
// The server says something every 15 s.
const SILENCE = 40000;
const MAX_EVENTS = 100;

/** `target` with `patch` applied; objects that do not change stay the same. */
export function patched(target, patch) {
  const result = { ...target };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const inner = result[name];
      const isObject = typeof inner === "object" && inner !== null && !Array.isArray(inner);
      result[name] = patched(isObject ? inner : {}, value);
    } else result[name] = value;
  }
  return result;
}

/**
 * Follow the cluster. Calls `onStatus(status)` after each change, `onLost(error)` when there is no connection, and
 * `onKey()`, awaited, when the server wants a key. With `models` it is the cluster of `models.cluster`, and that of
 * another when they send "change".
 */
export async function follow({ onStatus, onLost, onKey, models }) {
  let delay = FIRST_DELAY;
  let watchdog;
  let hasChanged = false;
  models?.addEventListener("change", () => {
    hasChanged = true;
    watchdog?.abort();
  });
  for (;;) {
    watchdog = new AbortController();
    hasChanged = false;
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => watchdog.abort(), SILENCE);
    };
    try {
      alive();
      const query = models?.cluster ? `?model=${encodeURIComponent(models.cluster)}` : "";
      const response = await ask(`/v1/cluster/events${query}`, { signal: watchdog.signal });
      let status = null;
      let ahead = 0;
      for await (const [event, text] of eventsOf(response)) {
        alive();
        const data = JSON.parse(text);
        if (event === "snapshot") {
          status = data;
          delay = FIRST_DELAY;
        } else if (event === "patch") status = patched(status, data);
        else if (event === "event") status = { ...status, events: [...status.events, data].slice(-MAX_EVENTS) };
        else continue;
        // The server's clock, as far as it is known here: the two need not agree.
        if (event === "snapshot") ahead = data.at - Date.now() / 1000;
        onStatus({ ...status, now: Date.now() / 1000 + ahead });
      }
      onLost(null);
    } catch (error) {
      if (hasChanged) {
        clearTimeout(timer);
        continue;
      }
      if (error.status === 401) {
        clearTimeout(timer);
        await onKey();
        continue;
      }
      onLost(error);
    }
    clearTimeout(timer);
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(delay * 1.6, MAX_DELAY);
  }
}
