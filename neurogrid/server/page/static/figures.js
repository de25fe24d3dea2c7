// The lines of a run's figures, as the page gets them while the run goes on.

import { thinned } from "./curves.js";

const newestHeldOut = (lines) => lines.findLast((line) => line.eval_loss != null)?.eval_loss ?? null;

/**
 * The round after which lines are wanted; null for none: all that the run has are there.
 *
 * The last round may be evaluated later than it was decided, in a line of its own: it is asked for again.
 */
export function wantedAfter(lines, status) {
  const last = lines.at(-1)?.round ?? 0;
  if (status.round < last) return 0; // it was resumed from an earlier checkpoint
  if (lines.length && status.round === last && newestHeldOut(lines) === (status.eval_loss ?? null)) return null;
  return Math.max(0, last - 1);
}

/** The lines with those that came, which are all after this round. */
export const joined = (lines, after, metrics) => thinned([...(after ? lines.filter((line) => line.round <= after) : []), ...metrics]);
