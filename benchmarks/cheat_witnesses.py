"""What do witnesses that lie change in a round, by how many of them there are?

    python benchmarks/cheat_witnesses.py [--rounds 300] [--no-file]

The machine that decides a witnessed run, with eight members, of which some lie together, and all of which bear witness,
or some that are drawn. They leave out what one honest member gave; they say that they have what one of them gave to
nobody; they say nothing; they say all that a filter can say. Each round is one of a run of its own, with a seed of its
own, so that who is a witness differs. Nothing here takes a network or a model: what is agreed follows from the proofs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from report import table, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the run of the tests

from neurogrid.training.witnessed import EpochPhase, Health, Witnessed, WitnessProof
from tests.unit.training.simulated_witnessed import RULES, WitnessedRun

NUM_MEMBERS = 8
PEERS = [f"peer {number}" for number in range(NUM_MEMBERS)]
Lie = Callable[[WitnessedRun, int, frozenset[int]], WitnessProof | None]


def leaves_out(run: WitnessedRun, seat: int, liars: frozenset[int]) -> WitnessProof:
    """A proof without the result of the first honest member."""
    everybody = set(run.state.healthy)
    return run.proof(seat, everybody - {min(everybody - liars)})


def has_all(run: WitnessedRun, seat: int, liars: frozenset[int]) -> WitnessProof:
    """A proof with each result, also of the liar that gave its own to nobody."""
    return run.proof(seat, run.state.healthy)


def says_nothing(run: WitnessedRun, seat: int, liars: frozenset[int]) -> None:
    """No proof."""


def fills_filters(run: WitnessedRun, seat: int, liars: frozenset[int]) -> WitnessProof:
    """A proof whose filters have every bit."""
    proof = run.proof(seat, run.state.healthy)
    full = b"\xff" * len(proof.results)
    return replace(proof, participants=full, results=full)


LIES: dict[str, Lie] = {
    "leave an honest result out": leaves_out,
    "have one that nobody has": has_all,
    "say nothing": says_nothing,
    "say all that filters can say": fills_filters,
}


def play(lie: Lie, liars: frozenset[int], num_witnesses: int, number: int) -> tuple[str, int]:
    """One round: what went wrong in it, and how many honest members are out."""
    run = WitnessedRun(replace(RULES, witnesses=num_witnesses))
    run._draws = 1000 * number  # seeds of its own
    run.train(*PEERS)
    seats = frozenset(run.state.healthy)
    honest = seats - liars
    absent = frozenset({max(liars)}) if lie is has_all and liars else frozenset[int]()
    begun = run.state.round
    run.commit()
    proofs = []
    for seat in sorted(run.parts.witnesses):
        proof = lie(run, seat, liars) if seat in liars else run.proof(seat, seats - absent)
        proofs += [] if proof is None else [proof]
    # An honest witness has not what was given to nobody; `proof` adds what is the witness's own.
    run.go(*map(Witnessed, proofs))
    while run.state.round == begun and run.state.phase is not EpochPhase.COOLDOWN:
        run.wait(1.0)
    out = sum(run.health[seat] is not Health.HEALTHY for seat in honest)
    if run.state.phase is EpochPhase.COOLDOWN:
        return run.state.ended, out
    if absent & run.agreed_seats:
        return "absent", out
    return ("" if honest <= run.agreed_seats else "left out"), out


def row(name: str, lie: Lie, num_witnesses: int, rounds: int) -> list[str]:
    """Row of a lie: how often it came to something, by the number of liars."""
    cells = [name, str(num_witnesses or NUM_MEMBERS)]
    for num_liars in range(1, NUM_MEMBERS - 1):
        found = [
            play(lie, _draw(num_liars, number), num_witnesses, number) for number in range(rounds)
        ]
        cells.append(_told([what for what, _ in found], sum(out for _, out in found)))
    return cells


def _draw(num_liars: int, number: int) -> frozenset[int]:
    """Seats of the liars: each in its turn, since seeds are drawn without regard to them."""
    return frozenset((number + each) % NUM_MEMBERS for each in range(num_liars))


def _told(whats: Collection[str], num_out: int) -> str:
    counts = {what: sum(each == what for each in whats) for what in sorted({*whats} - {""})}
    words = [f"{what} {100 * count / len(whats):.0f} %" for what, count in counts.items()]
    words += [f"{num_out} honest out"] if num_out else []
    return ", ".join(words) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="of each kind and number")
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    rows = [
        row(name, lie, num_witnesses, options.rounds)
        for num_witnesses in (0, 5, 3)
        for name, lie in LIES.items()
    ]
    header = ("those that lie", "witnesses", *(f"{n} of 8" for n in range(1, NUM_MEMBERS - 1)))
    text = (
        f"{table(header, rows)}\n\n{options.rounds} rounds of each. Left out: a result of an honest member was not "
        "agreed. Absent: one was agreed that nobody but a liar has. Quorum: the epoch ended, for want of proofs; "
        "members begin another one. Nothing: what was agreed is what honest members gave.\n"
    )
    if options.no_file:
        print(text)
    else:
        write_report("cheat-witnesses", (__doc__ or "").partition("\n")[0], text)


if __name__ == "__main__":
    main()
