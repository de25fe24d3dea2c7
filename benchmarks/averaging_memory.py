"""How much memory has a member of a group beside its process and its vector, at most within a round and after it?

    python benchmarks/averaging_memory.py [--members 4] [--mib 64] [--rounds 9] [--codecs f32 int8]

Processes on one machine average one vector after another by a butterfly. What is told is anonymous memory, sampled each
4 ms, beyond what a process had with its vector before it joined, in vectors. The mean that it is given is one of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from report import table, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes of the tests

from tests.e2e.averaging_processes import AveragingPeer, crowd, wait_for

MIB = 1 << 20
PAUSE = 0.004  # seconds between two looks
PATIENCE = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--codecs", nargs="+", default=["f32", "int8"])
    options = parser.parse_args()
    rows = []
    for codec in options.codecs:
        rows += measure(codec, options.members, options.mib * MIB, options.rounds)
    header = ("codec", "member", "at most within a round", "after the last")
    write_report(
        "averaging_memory",
        (__doc__ or "").partition("\n")[0],
        f"{options.members} members, {options.mib} MiB a vector, {options.rounds} rounds; in vectors, of which at most "
        f"2.5 are asked. All had the same means.\n\n{table(header, rows)}",
    )


def measure(codec: str, num: int, num_bytes: int, num_rounds: int) -> list[tuple[str, ...]]:
    """A row for each member."""
    args = ("--min-members", str(num), "--codec", codec, "--result-codec", codec, "--pause", "0.2")
    with (
        tempfile.TemporaryDirectory() as directory,
        crowd(Path(directory), *args, num_elements=num_bytes // 4, timeout=PATIENCE) as members,
    ):
        peers = [members.start() for _ in range(num)]
        before = [int(peer.hear("ready")["memory"]) for peer in peers]
        with watched(peers) as most:
            for peer in peers:
                members.begin(peer)
            wait_for(
                lambda: all(len(peer.outcomes) >= num_rounds for peer in peers), "rounds", PATIENCE
            )
        for told in zip(*(peer.outcomes[:num_rounds] for peer in peers), strict=True):
            assert len({outcome["digest"] for outcome in told}) == 1
        after = [int(peer.outcomes[-1]["memory"]) for peer in peers]
        return [
            (
                codec,
                str(peer.number),
                f"{(most[i] - before[i]) / num_bytes:.2f}",
                f"{(after[i] - before[i]) / num_bytes:.2f}",
            )
            for i, peer in enumerate(peers)
        ]


@contextmanager
def watched(peers: Sequence[AveragingPeer]) -> Iterator[list[int]]:
    """The most anonymous memory of each process so far, in bytes."""
    most, is_over = [0] * len(peers), threading.Event()
    places = [Path(f"/proc/{peer.process.pid}/status") for peer in peers]

    def watch() -> None:
        while not is_over.is_set():
            for number, place in enumerate(places):
                lines = place.read_text().splitlines()
                [line] = [line for line in lines if line.startswith("RssAnon:")]
                most[number] = max(most[number], int(line.split()[1]) * 1024)
            time.sleep(PAUSE)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    main()
