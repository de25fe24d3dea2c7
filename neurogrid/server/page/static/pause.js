// Why nothing comes, in words: from what is known of the cluster while an answer is waited for.

import { bytes, layers, nameOf, remaining, shortId, withShortIds } from "./format.js";
import { came } from "./picture.js";

/**
 * What is waited for, and whether that is trouble. `status` is null while there is no connection; `hasBegun` says
 * whether a part of the answer came already.
 */
export function reasonToWait(status, hasBegun) {
  if (status === null) return { text: "no connection to the coordinator", isTrouble: true };
  const peers = Object.values(status.peers);
  switch (status.phase) {
    case "reading":
      return { text: "the model is being read", isTrouble: false };
    case "waiting":
      return { text: `waiting for workers: ${status.workers_found} of ${status.workers_wanted} are there`, isTrouble: true };
    case "transferring":
      return { text: `weights are on their way: ${transferred(peers)}`, isTrouble: false };
    case "mending": {
      const loss = status.failures.at(-1);
      const lost = loss ? `a worker was lost (${layers(loss.layers)}): ${loss.action}` : "a worker was lost, and its layers are being placed anew";
      const more = peers.some((peer) => peer.transfer && !peer.transfer.is_done) ? `, ${transferred(peers)}` : "";
      return { text: withShortIds(lost + more), isTrouble: true };
    }
  }
  const silent = peers.filter((peer) => peer.health === "suspected");
  if (silent.length) return { text: `waiting for ${silent.map((peer) => `${nameOf(peer)} ${shortId(peer.peer_id)}`).join(" and ")}, which does not answer`, isTrouble: true };
  if (!hasBegun && status.num_waiting) return { text: `waiting for room: ${status.num_running} are being answered`, isTrouble: false };
  return { text: hasBegun ? "waiting for the next words" : "reading what was said so far", isTrouble: false };
}

function transferred(peers) {
  const transfers = peers.flatMap((peer) => (peer.transfer && !peer.transfer.is_done ? [peer.transfer] : []));
  const planned = transfers.reduce((sum, one) => sum + one.planned_bytes, 0);
  const here = transfers.reduce((sum, one) => sum + one.planned_bytes * came(one), 0);
  const left = remaining(Math.max(0, ...transfers.map((one) => one.remaining_seconds ?? 0)) || null);
  return `${bytes(here)} of ${bytes(planned)}${left && `, ${left}`}`;
}
