"""Who finds which cheat, after how many rounds, and what does a cheat cost the run?

    python benchmarks/cheats.py

Eight members train a small Llama on the sources of Python's library by DisTrO, in this process, with real gradients;
one of them cheats (three where losses are compared). Claims, audits and evidence are those of runs; what differs
between processors is real, too: products in bfloat16, other micro-batches, other instructions in a process of its own.

What the members do is in `cheat_fleet.py`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from cheat_fleet import (
    CHEATS,
    LLAMA,
    LR,
    MEMBERS,
    ROWS,
    RUN,
    SAMPLES,
    SETTINGS,
    TOKENS,
    WITHIN,
    Fleet,
    advantages,
    begun_at,
    dense,
    diloco_figures,
    gradient_figures,
)
from report import spread, table, write_report
from safetensors.torch import load_file, save_file
from torch import Tensor

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import (
    Apart,
    Audited,
    Band,
    Facts,
    Figures,
    Made,
    Material,
    MaterialError,
    Named,
    Thresholds,
    Watch,
    apart,
    audit,
    check_evidence,
    draw_audits,
    figures_of,
    measured_band,
    pack_evidence,
    refusal,
    rounds_to_detection,
    sign_claim,
    sign_finding,
    start_of,
    sums_of,
)

CHEAT = 5
SHARES = (0.05, 0.1, 0.25)
FLOOR = 1e-7
PROCESSORS: dict[str, dict[str, Any]] = {
    "alike": {},
    "products in bfloat16": {"in_bfloat16": True},
    "micro-batches of 1": {"at_once": 1},
    "2 threads": {"threads": 2},
}
IDENTITIES = [Identity.generate() for _ in range(MEMBERS)]


def looked_at(made: Made, again: Tensor, band: Band) -> Audited:
    """As an auditor does: with the momentum before; where bits differ, with those afterwards."""
    try:
        return audit(
            made.claim, made.coefficients, Material(made.material.before), again, LR, SETTINGS, band, is_agreed=True
        )  # fmt: skip
    except MaterialError:
        return audit(
            made.claim, made.coefficients, made.material, again, LR, SETTINGS, band, is_agreed=True
        )


def third_says(fleet: Fleet, seat: int, made: Made, data: bytes, accuser: str, band: Band) -> Named:
    """Whom evidence is against, by one that computes in other micro-batches."""
    facts = Facts(
        RUN, seat, 1, made.claim.round, made.claim.weights, SETTINGS.digest(LR), SAMPLES, start_of(SETTINGS)
    )  # fmt: skip
    named, _ = check_evidence(
        data, facts, {accuser}, IDENTITIES[seat].peer_id,
        lambda evidence: looked_at(made, fleet.own(seat, at_once=1), band),
    )  # fmt: skip
    return named


def accuse(seat: int, made: Made, audited: Audited, auditor: int) -> bytes:
    return pack_evidence(
        IDENTITIES[seat].peer_id, IDENTITIES[auditor].peer_id, sign_claim(made.claim, IDENTITIES[seat]),
        sign_finding(audited.finding, IDENTITIES[auditor]),
    )  # fmt: skip


# What honest processors are apart


def measure_band(fleet: Fleet) -> tuple[Band, list[list[str]]]:
    """Pairs of processors on the same rows: one table row each, and the band of all."""
    found: dict[str, list[Apart]] = defaultdict(list)
    equal: Counter[str] = Counter()
    seats = range(4)
    plain = [fleet.own(seat) for seat in seats]
    others = {name: [fleet.own(seat, **how) for seat in seats] for name, how in PROCESSORS.items()}
    others["no vector instructions"] = in_another_process(fleet)
    for name, gradients in others.items():
        for one, other in zip(plain, gradients, strict=True):
            equal[name] += torch.equal(one, other)
            found[name].append(apart(sums_of(one, other, SETTINGS), FLOOR))
    rows = [
        [
            name,
            f"{equal[name]} of {len(pairs)}",
            *(
                f"{max(getattr(pair, what) for pair in pairs):.1e}"
                for what in ("angle", "log_ratio", "tensor_angle", "tensor_log_ratio")
            ),
        ]
        for name, pairs in found.items()
    ]
    band = measured_band([pair for pairs in found.values() for pair in pairs], floor=FLOOR)
    return band, rows


def in_another_process(fleet: Fleet) -> list[Tensor]:
    """The gradients of the first four seats, by a process that is told to use no vector instructions."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_file(
            {"weights": fleet.weights, **{f"rows{seat}": fleet.rows(seat) for seat in range(4)}},
            path / "in",
        )
        subprocess.run(
            [sys.executable, __file__, "--child", directory],
            check=True,
            env={
                **os.environ,
                "ATEN_CPU_CAPABILITY": "default",
                "MKL_CBWR": "COMPATIBLE",
                "ONEDNN_MAX_CPU_ISA": "SSE41",
            },
        )
        found = load_file(path / "out")
    return [found[f"gradient{seat}"] for seat in range(4)]


def child(directory: Path) -> None:
    given = load_file(directory / "in")
    found = {
        f"gradient{seat}": LLAMA.gradient(given["weights"], given[f"rows{seat}"])
        for seat in range(4)
    }
    save_file(found, directory / "out")


# Honest rounds


@dataclass
class Honest:
    """What came of honest rounds.

    Attributes:
        audits: of claims, by processors of several kinds in turn.
        equal: of these, bit for bit the same.
        accusations, doubts: of these.
        largest: bands that a claim was off at most.
        refused: by each of the thresholds, vectors of members.
        vectors: of members that the thresholds were tried on.
        falsely_accused: members whom a lying auditor accused; named: accusers that a third has named for it.
    """

    rounds: int = 0
    audits: int = 0
    equal: int = 0
    accusations: int = 0
    doubts: int = 0
    largest: float = 0.0
    refused: int = 0
    vectors: int = 0
    falsely_accused: int = 0
    named: int = 0
    audit_seconds: float = 0.0


def honest_rounds(number: int, band: Band) -> tuple[Honest, list[Figures]]:
    """Every claim of every round is audited, each by the next kind of processor."""
    found, figures = Honest(), []
    fleet = Fleet(1)
    kinds = list(PROCESSORS.values())
    for _ in range(number):
        made = fleet.make({})
        for seat, each in made.items():
            again = fleet.own(seat, **kinds[(fleet.round + seat) % len(kinds)])
            began = time.process_time()
            audited = looked_at(each, again, band)
            found.audit_seconds += time.process_time() - began
            found.audits += 1
            found.equal += audited.is_equal
            found.largest = max(found.largest, audited.finding.excess)
            found.accusations += audited.finding.accuses
            found.doubts += not audited.finding.holds and not audited.finding.accuses
        if fleet.round % 10 == 0:
            of_round = figures_of([dense(each.coefficients) for each in made.values()])
            figures += of_round
            seat = fleet.round // 10 % MEMBERS
            lie = replace(looked_at(made[seat], fleet.own(seat), band).finding, excess=100.0)
            auditor = (seat + 1) % MEMBERS
            data = accuse(seat, made[seat], Audited(lie, False), auditor)
            found.falsely_accused += 1
            peer = IDENTITIES[auditor].peer_id
            found.named += third_says(fleet, seat, made[seat], data, peer, band) == Named.ACCUSER
        fleet.apply(made)
        found.rounds += 1
    found.vectors = len(figures)
    found.refused = sum(bool(refusal(each, Thresholds())) for each in figures)
    return found, figures


def threshold_row(name: str, figures: Sequence[Figures]) -> list[str]:
    refused = Counter(
        refusal(each, Thresholds()).partition(" is ")[0].removeprefix("its ") for each in figures
    )
    total = len(figures) - refused.pop("", 0)
    return [
        name,
        str(len(figures)),
        spread([each.cosine for each in figures]).show(2),
        spread([each.norm_ratio for each in figures]).show(2),
        spread([each.variance_ratio for each in figures]).show(1),
        f"{100 * total / len(figures):.0f} %",
    ]


# Cheats, until they are found


@dataclass
class Watched:
    """One cheat over some rounds, for one seed.

    Attributes:
        accused: for each round, whether an auditor that looks at the claim accuses, by its processor and its band.
        least: bands that a claim was off, the least of all rounds, by the same.
        confirmed: of the accusations, those that a third of another kind confirms.
        refused: rounds whose figures are beyond a threshold.
        by_cosine, by_worth: round in which the cheat is first the oddest by figures of that kind over the rounds.
    """

    accused: dict[str, list[bool]]
    least: dict[str, float]
    confirmed: list[bool]
    refused: list[bool]
    by_cosine: int | None
    by_worth: int | None


AUDITORS = {
    "alike": ("alike", False),
    "bfloat16": ("products in bfloat16", False),
    "bfloat16, default band": ("products in bfloat16", True),
}


def watched(kind: str, begun: Fleet, rounds: int, band: Band) -> Watched:
    fleet = copy.deepcopy(begun)
    found = Watched({name: [] for name in AUDITORS}, {}, [], [], None, None)
    cosines, worths = Watch(), Watch()
    for number in range(1, rounds + 1):
        made = fleet.make({CHEAT: kind})
        cheated = made[CHEAT]
        for name, outcomes in found.accused.items():
            processor, has_default = AUDITORS[name]
            again = fleet.own(CHEAT, **PROCESSORS[processor])
            audited = looked_at(cheated, again, Band() if has_default else band)
            outcomes.append(audited.finding.accuses)
            found.least[name] = min(found.least.get(name, 1e9), audited.finding.excess)
            if not has_default and audited.finding.accuses:
                auditor = (CHEAT + number) % MEMBERS
                auditor += auditor == CHEAT
                data = accuse(CHEAT, cheated, audited, auditor % MEMBERS)
                peer = IDENTITIES[auditor % MEMBERS].peer_id
                found.confirmed.append(
                    third_says(fleet, CHEAT, cheated, data, peer, band) == Named.ACCUSED
                )
        rows = [dense(each.coefficients) for each in made.values()]
        figures = figures_of(rows)
        found.refused.append(bool(refusal(figures[CHEAT], Thresholds())))
        cosines.add({seat: each.cosine for seat, each in enumerate(figures)})
        worths.add(advantages(fleet, rows))
        if found.by_cosine is None and number >= 3 and cosines.oddest(1) == [CHEAT]:
            found.by_cosine = number
        if found.by_worth is None and number >= 3 and worths.oddest(1) == [CHEAT]:
            found.by_worth = number
        fleet.apply(made)
    return found


def rounds_until(outcomes: Sequence[bool], share: float, draws: int) -> list[float]:
    """Rounds until a draw falls on the cheat in a round whose audit accuses: the seeds are those of `draw_audits`."""
    if not any(outcomes):
        return []
    found: list[float] = []
    seats = range(MEMBERS)
    for draw in range(draws):
        number = 0
        while True:
            seed = (draw << 64 | number).to_bytes(32, "big")
            accuses = outcomes[number % len(outcomes)]
            number += 1
            if accuses and any(a.seat == CHEAT for a in draw_audits(seed, seats, seats, share)):
                break
        found.append(number)
    return found


def lying_auditors(draws: int) -> list[list[str]]:
    """A member that cheats in each round, and an auditor that says of its claims that they hold."""
    rows = []
    seats, accomplice = range(MEMBERS), 2
    for share in SHARES:
        for copies in (1, 2):
            until, covered = [], []
            for draw in range(draws):
                number, is_covered = 0, False
                while True:
                    seed = (draw << 64 | number).to_bytes(32, "little")
                    number += 1
                    auditors = {
                        a.auditor
                        for a in draw_audits(seed, seats, seats, share, copies=copies)
                        if a.seat == CHEAT
                    }
                    is_covered |= accomplice in auditors
                    if auditors - {accomplice}:
                        break
                until.append(number)
                covered.append(accomplice in auditors)
            rows.append(
                [
                    f"{share:.0%}",
                    str(copies),
                    f"{median(until):.0f} ({sorted(until)[int(0.95 * draws)]})",
                    f"{mean(until):.1f}",
                    f"{rounds_to_detection(share, honest=6 / 7 if copies == 1 else 1):.1f}",
                    f"{100 * mean(covered):.0f} %",
                ]
            )
    return rows


# What cheats cost


def final_loss(
    begun: Fleet,
    kind: str,
    cheaters: Sequence[int],
    rounds: int,
    *,
    share: float = 0.0,
    aggregator: str = "",
    band: Band | None = None,
) -> tuple[float, float | None]:
    """The loss of what is held out, and the round in which the last cheat was found.

    Args:
        share: of the claims that are audited; who is found is put out, and the others go on.
    """
    fleet = copy.deepcopy(begun)
    cheats = dict.fromkeys(cheaters, kind) if kind else {}
    last = None
    for number in range(1, rounds + 1):
        made = fleet.make(cheats)
        found = set()
        if share:
            seed = (10**6 + number).to_bytes(32, "big")
            for each in draw_audits(seed, fleet.seats, fleet.seats, share):
                audited = looked_at(made[each.seat], fleet.own(each.seat), band or Band())
                if audited.finding.accuses:
                    found.add(each.seat)
        fleet.apply(made, aggregator)
        for seat in found:
            fleet.seats.remove(seat)
            cheats.pop(seat, None)
            last = number
    return LLAMA.loss(fleet.weights, LLAMA.held), last if not cheats else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--honest", type=int, default=1000, help="rounds in which every claim is audited"
    )
    parser.add_argument(
        "--before", type=int, default=20, help="honest rounds before a cheat begins"
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="with a cheat, each of them looked at"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cheat")
    parser.add_argument("--draws", type=int, default=300, help="draws of auditors for each run")
    parser.add_argument("--end", type=int, default=100, help="rounds until losses are compared")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        child(options.child)
        return
    begun = [begun_at(seed + 1, options.before) for seed in range(options.seeds)]
    band, processors = measure_band(begun[0])
    say("band measured")
    figures = [
        threshold_row("gradients", gradient_figures(copy.deepcopy(begun[0]))),
        threshold_row("differences of 20 steps (DiLoCo)", diloco_figures()),
    ]
    honest, of_distro = honest_rounds(options.honest, band)
    figures.append(threshold_row("signs of DisTrO", of_distro))
    say("honest rounds")
    cheats = [cheat_row(kind, begun, options.rounds, options.draws, band) for kind in CHEATS]
    say("cheats")
    losses = loss_rows(begun[0], options.end, band)
    auditing = 1000 * honest.audit_seconds / honest.audits
    widths = (band.angle, band.log_ratio, band.tensor_angle, band.tensor_log_ratio)
    write_report(
        "cheats",
        f"{MEMBERS} members, a Llama of 2 layers, hidden size 32, {SETTINGS.num_elements:,} parameters, batches of "
        f"{ROWS} x {TOKENS} bytes a member and round, DisTrO with the {SETTINGS.top_k} greatest of chunks up to "
        f"{SETTINGS.max_side} x {SETTINGS.max_side} as signs, decay {SETTINGS.decay}, lr {LR:g}.",
        "\n\n".join(
            [
                "## What honest processors are apart",
                "The same rows on the same weights, beside one thread in float32; largest of 4 gradients.",
                table(
                    [
                        "processor",
                        "same bits",
                        "angle",
                        "log ratio",
                        "tensor's angle",
                        "its log ratio",
                    ],
                    processors,
                ),
                "The band that follows, twice as wide as the widest of each: "
                + ", ".join(f"{each:.1e}" for each in widths)
                + ". It is used below where no other one is named.",
                "## Honest rounds",
                f"{honest.rounds} rounds, each of their {honest.audits:,} claims audited, by processors of these kinds "
                f"in turn (those of this process): {honest.accusations} accusations, {honest.doubts} doubts, "
                f"{honest.equal:,} with the same bits; at most {honest.largest:.2f} bands off. An audit takes "
                f"{auditing:.0f} ms of CPU beside the gradient. Of {honest.falsely_accused} false accusations, signed "
                f"by an auditor of an honest claim, a third named the accuser in {honest.named}.",
                "## Thresholds (NeuroShard's) on honest members",
                "Each beside the mean of the others; median (minimum to maximum).",
                table(
                    ["vectors", "number", "cosine", "ratio of norms", "of variances", "refused"],
                    figures,
                ),
                "## Cheats",
                f"One of {MEMBERS} cheats in every round after {options.before} honest ones, {options.rounds} rounds, "
                f"{options.seeds} seeds. Thresholds: share of its vectors that are refused. Oddest: rounds until the "
                "cheat is the oddest of all by its cosines, and by the advantage of the samples that it was given "
                "(worst of the seeds; at least 3 are looked at). Rounds until found: all claims of the cheat were "
                f"audited; {options.draws} draws a seed say which of these audits would have been made: median (19 of "
                "20 found by), auditors with the same processor. Of those in bfloat16, and of those with the default "
                "band besides, the share of audits that accuse. Confirmed: accusations that a third, who computes in "
                "micro-batches of 1, confirmed.",
                table(
                    [
                        "cheat",
                        "thresholds",
                        "oddest by cosine",
                        "by worth",
                        *(f"found at {s:.0%}" for s in SHARES),
                        "alike",
                        "bfloat16",
                        "default band",
                        "least off",
                        "confirmed",
                    ],
                    cheats,
                ),
                "## Witnesses that lie",
                f"A member that cheats in each round, and one other auditor of {MEMBERS - 1} that says that they hold. "
                "Rounds until an honest auditor is drawn: median (19 of 20 by), mean, mean by the formula; and how "
                "often the one that lied was drawn for the same claim, and so is named with it.",
                table(
                    [
                        "share",
                        "auditors of a claim",
                        "rounds",
                        "mean",
                        "formula",
                        "liar named, too",
                    ],
                    lying_auditors(2000),
                ),
                "## What it costs",
                f"Loss of what is held out {options.end} rounds after the cheats began, one seed. Audits are of 10 % "
                "of the claims; who is found goes, and in brackets is the round in which the last one went.",
                table(
                    [
                        "cheat",
                        "1 of 8",
                        "1 of 8, audits",
                        "3 of 8",
                        "3 of 8, audits",
                        "median",
                        "trimmed_mean:0.375",
                        "multi_krum:2",
                        "krum",
                        "geometric_median",
                    ],
                    losses,
                ),
                f"CPU time of all: {time.process_time():.0f} s.",
            ]
        ),
    )


def say(what: str) -> None:
    print(f"{what} at {time.process_time():.0f} s of CPU", file=sys.stderr, flush=True)


def cheat_row(kind: str, begun: Sequence[Fleet], rounds: int, draws: int, band: Band) -> list[str]:
    runs = [watched(kind, fleet, rounds, band) for fleet in begun]
    say(kind)

    def share(values: list[bool]) -> str:
        return f"{100 * mean(values):.0f} %" if values else "none"

    def first(values: list[int | None]) -> str:
        known = [each for each in values if each is not None]
        return f"{max(known)}" if len(known) == len(values) else f"{len(known)} of {len(values)}"

    cells = [kind, share([each for run in runs for each in run.refused])]
    cells += [first([run.by_cosine for run in runs]), first([run.by_worth for run in runs])]
    for part in SHARES:
        until = sorted(
            each for run in runs for each in rounds_until(run.accused["alike"], part, draws)
        )
        cells.append(
            f"{median(until):.0f} ({until[int(0.95 * len(until))]:.0f})" if until else "never"
        )
    cells += [share([each for run in runs for each in run.accused[name]]) for name in AUDITORS]
    cells.append(f"{min(run.least['alike'] for run in runs):.1f}")
    confirmed = [each for run in runs for each in run.confirmed]
    cells.append(f"{sum(confirmed)} of {len(confirmed)}")
    return cells


def loss_rows(begun: Fleet, rounds: int, band: Band) -> list[list[str]]:
    """One cheat a row; of aggregators only for cheats that they are about, and for none."""
    three = (3, CHEAT, 6)
    robust = ("median", "trimmed_mean:0.375", "multi_krum:2", "krum", "geometric_median")

    def cell(*arguments: Any, **more: Any) -> str:
        loss, last = final_loss(begun, *arguments, rounds, **more)
        return f"{loss:.3f}" + (f" ({last})" if last else "")

    rows = []
    for kind in ("", *(each for each in CHEATS if each != WITHIN)):
        row = [kind or "none", cell(kind, (CHEAT,))]
        audited: dict[str, Any] = {"share": 0.1, "band": band}
        row += [cell(kind, (CHEAT,), **audited), *([] if kind else ["", ""])]
        if kind:
            row += [cell(kind, three), cell(kind, three, **audited)]
        has_robust = kind in ("", "sign flipped", "noise", "does not compute")
        row += [cell(kind, three, aggregator=each) if has_robust else "" for each in robust]
        rows.append(row)
        say(f"losses: {kind or 'none'}")
    return rows


if __name__ == "__main__":
    main()
