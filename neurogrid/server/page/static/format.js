// Numbers as people read them. What is not known is a dash.

const UNITS = ["", "k", "M", "G", "T", "P"];

function scaled(value, digits) {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < UNITS.length - 1) {
    value /= 1000;
    power += 1;
  }
  const places = value >= 100 || power === 0 ? 0 : digits;
  return [value.toFixed(places), UNITS[power]];
}

export function bytes(value) {
  if (value == null) return "–";
  const [number, unit] = scaled(value, 1);
  return `${number} ${unit}B`;
}

export function rate(value) {
  return value == null ? "–" : `${bytes(value)}/s`;
}

export function flops(value) {
  if (value == null) return "–";
  const [number, unit] = scaled(value, 1);
  return `${number} ${unit}FLOP/s`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** A duration in seconds: 850 µs, 3.2 ms, 0.24 s, 1:05. */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 60) {
    const whole = Math.round(seconds);
    return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
  }
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  if (seconds >= 0.1) return `${seconds.toFixed(2)} s`;
  const milliseconds = seconds * 1000;
  if (milliseconds >= 1) return `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
  return `${Math.round(milliseconds * 1000)} µs`;
}

/** What is left of something, rounded up: 0:07. */
export function remaining(seconds) {
  if (seconds == null) return "";
  const whole = Math.ceil(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} left`;
}

export function perSecond(value) {
  if (!value) return "0";
  if (value >= 100) return value.toFixed(0);
  return value.toFixed(1);
}

/** Layers [start, stop): `layers 0–3`. */
export function layers(range) {
  if (!range || range.stop <= range.start) return "no layers";
  const last = range.stop - 1;
  return range.start === last ? `layer ${last}` : `layers ${range.start}–${last}`;
}

/** The end of a peer id: the beginning is the same for all keys of one kind. */
export function shortId(peerId) {
  return `…${peerId.slice(-8)}`;
}

/** What people call a worker: its machine's name, else its device. Both are its own words and prove nothing. */
export function nameOf(peer) {
  return peer.machine || peer.name;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

/** A text with its peer ids as short as elsewhere on the page. */
export function withShortIds(text) {
  return text.replace(/\b(?:12D3KooW|16Uiu2HAm|Qm)[1-9A-HJ-NP-Za-km-z]{40,48}\b/g, shortId);
}
