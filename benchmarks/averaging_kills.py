"""What does it cost the members of a group when one of them is killed, stands still, or comes back?

    python benchmarks/averaging_kills.py [--kills 100] [--stops 6] [--forms 6] [--mib 4] [--grace 2]

Four processes on one machine average one vector after another. Groups are formed with that vector and with one of
4 KiB, whose round takes next to nothing; they begin when all have imported what they need, and have their first vector.
Every other kill is of the leader. Each outcome of each member is compared with those of the others, and with the mean
of the contributors that it names, computed here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from report import spread, table, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes of the tests

from tests.e2e.averaging_processes import AveragingPeer, Crowd, crowd, wait_for
from tests.e2e.test_averaging_kills import NUM_MEMBERS, kill_one

MIB_ELEMENTS = 1 << 18


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--forms", type=int, default=6)
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--grace", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    random = Random(options.seed)
    rows = [
        *_form("4 KiB", 1 << 10, options.forms, options.grace),
        *_form(f"{options.mib} MiB", options.mib * MIB_ELEMENTS, options.forms, options.grace),
    ]
    with (
        tempfile.TemporaryDirectory() as directory,
        crowd(
            Path(directory),
            "--grace",
            str(options.grace),
            num_elements=options.mib * MIB_ELEMENTS,
        ) as members,
    ):
        members.assemble(NUM_MEMBERS)
        rows += _kill(members, random, options.kills)
        rows += _stop(members, random, options.stops, options.grace)
        rounds = members.check()
        rows.append(("rounds, compared and computed again", str(rounds), "-", "-", "-"))
    header = ("what", "times", "least", "median", "most")
    if options.no_file:
        print(table(header, rows))
    else:
        write_report("averaging_kills", (__doc__ or "").partition("\n")[0], table(header, rows))


def _row(what: str, seconds: Sequence[float]) -> tuple[str, ...]:
    low, mid, high = spread(seconds)
    return what, str(len(seconds)), *(f"{1e3 * one:.0f} ms" for one in (low, mid, high))


def _form(what: str, num_elements: int, number: int, grace: float) -> list[tuple[str, ...]]:
    since_begun: list[float] = []
    since_joined: list[float] = []
    for _ in range(number):
        with (
            tempfile.TemporaryDirectory() as directory,
            crowd(Path(directory), "--grace", str(grace), num_elements=num_elements) as members,
        ):
            peers = [members.start() for _ in range(NUM_MEMBERS)]
            for peer in peers:
                peer.hear("ready")
            begun = [members.begin(peer) for peer in peers][-1]
            members.settle()
            joined = max(peer.hear("joined")["at"] for peer in peers)
            decided = max(peer.outcomes[0]["at"] for peer in peers)
            since_begun.append(decided - begun)
            since_joined.append(decided - joined)
    if not number:
        return []
    return [
        _row(f"forming, {what}: the last one begins, to the first round of all", since_begun),
        _row(f"forming, {what}: the last one is a member, to that round", since_joined),
    ]


def _kill(members: Crowd, random: Random, number: int) -> list[tuple[str, ...]]:
    lost: dict[bool, list[float]] = {True: [], False: []}
    back: list[float] = []
    spare = members.start()
    for count in range(number):
        the_leader = count % 2 == 0
        lost[the_leader].append(kill_one(members, random, the_leader=the_leader))
        back.append(_come_back(members, spare))
        spare = members.start()
        members.settle(time.monotonic())
        print(count, lost[the_leader][-1], back[-1], flush=True)
        if count % 10 == 9:
            members.check()
    if not number:
        return []
    return [
        _row("kill -9 of the leader, to a round of the rest", lost[True]),
        _row("kill -9 of another, to a round of the rest", lost[False]),
        _row("a process that comes, to a round with it, after its imports", back),
    ]


def _come_back(members: Crowd, peer: AveragingPeer) -> float:
    peer.hear("ready")
    begun = members.begin(peer)
    return float(peer.outcome_after(begun, lambda o: o["has_contributed"])["at"]) - begun


def _stop(members: Crowd, random: Random, number: int, grace: float) -> list[tuple[str, ...]]:
    without: list[float] = []
    told: list[float] = []
    for count in range(number):
        leader = members.leader
        others = [member for member in members.members if member is not leader]
        still = leader if count % 2 == 0 else random.choice(others)
        time.sleep(random.uniform(0.0, 2.0) * leader.outcomes[-1]["seconds"])
        stopped_at = still.stop()
        without.append(_time_without(members, still, stopped_at) - stopped_at)
        time.sleep(max(0.0, stopped_at + 3 * grace - time.monotonic()))
        went_on_at = still.go_on()
        told.append(_time_told(still, went_on_at) - went_on_at)
        members.bring_back(still, went_on_at)
        members.settle(went_on_at)
    if not number:
        return []
    return [
        _row(f"SIGSTOP (grace {grace:g} s), to a round of the rest", without),
        _row("one that goes on after three graces, until it is told", told),
    ]


def _time_without(members: Crowd, still: AveragingPeer, since: float) -> float:
    """Time at which all others had decided a round without this one."""
    return max(
        float(member.outcome_after(since, lambda o: still.peer_id not in o["contributors"])["at"])
        for member in members.members
        if member is not still
    )


def _time_told(still: AveragingPeer, since: float) -> float:
    """Time at which one that goes on was told an outcome, or that it is no member any more."""

    def told() -> float | None:
        said = [s for s in list(still.said) if s["at"] > since and {"round", "dropped"} & s.keys()]
        return float(said[0]["at"]) if said else None

    return float(wait_for(told, "what one that goes on is told"))


if __name__ == "__main__":
    main()
