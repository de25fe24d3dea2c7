// The last rounds: a grid of who took part and who was late, and a table of the newest.

import { bytes, duration } from "./format.js";
import { html, setText } from "./dom.js";
import { seatColour } from "./members.js";

const MAX_ROWS = 8;

/** What the columns of the table are, and those of a chain's. */
export const ROUND_HEADS = ["Round", "Took", "Loss", "Held-out", "Took part", "Late", "Sent"];
export const STEP_HEADS = ["Step", "Took", "Loss", "Held-out", "Stages", "Waited", "By order"];

/** A table with a row for each seat and a column for each round; the seconds that each took stand above. */
export function drawGrid(table, rounds) {
  const seats = [...new Set(rounds.flatMap((one) => [...one.seats, ...one.late]))].sort((one, other) => one - other);
  const names = Object.assign({}, ...rounds.map((one) => one.names));
  const longest = Math.max(...rounds.map((one) => one.seconds), 1e-9);
  const bars = rounds.map((one) => {
    const bar = html("span", { class: "took", title: `Round ${one.round} took ${duration(one.seconds)}` });
    bar.style.height = `${Math.max((one.seconds / longest) * 26, 2)}px`;
    return html("th", { scope: "col" }, bar, html("span", { class: "hidden" }, `Round ${one.round}, ${duration(one.seconds)}`));
  });
  const rows = seats.map((seat) => {
    const cells = rounds.map((one) => {
      const what = one.seats.includes(seat) ? "took part" : one.late.includes(seat) ? "late" : "not in it";
      const kind = { "took part": "is-in", late: "is-late" }[what] ?? "";
      return html("td", {}, html("span", { class: `cell ${kind}`, title: `Round ${one.round}: ${what}` }), html("span", { class: "hidden" }, what));
    });
    const row = html("tr", {}, html("th", { scope: "row" }, names[seat] ?? `member ${seat}`), ...cells);
    row.style.setProperty("--stage", seatColour(seat));
    return row;
  });
  table.replaceChildren(html("thead", {}, html("tr", {}, html("th", { class: "corner" }, "took"), ...bars)), html("tbody", {}, ...rows));
}

export class Round {
  constructor() {
    this.cells = Array.from({ length: 7 }, () => html("td"));
    this.element = html("tr", {}, ...this.cells);
  }

  update({ round, isChain }) {
    const named = (seats) => seats.map((seat) => round.names[seat] ?? `member ${seat}`).join(", ");
    const { loss, eval_loss: held, stages, waited, bubble } = round.figures;
    const share = (part) => (part == null ? "–" : `${Math.round(100 * part)} %`);
    const texts = [
      `${round.round}`,
      duration(round.seconds),
      loss?.toFixed(4) ?? "–",
      held?.toFixed(4) ?? "–",
      ...(isChain
        ? [`${stages ?? "–"}`, share(waited), share(bubble)]
        : [named(round.seats), named(round.late) || "nobody", round.sent_bytes ? bytes(round.sent_bytes) : "–"]),
    ];
    this.cells.forEach((cell, index) => {
      setText(cell, texts[index] ?? "");
      cell.hidden = index >= texts.length;
    });
    this.cells[5].classList.toggle("is-warned", !isChain && round.late.length > 0);
  }
}

/** The rounds of the table, newest first. */
export function newest(rounds) {
  return rounds.slice(-MAX_ROWS).reverse();
}
