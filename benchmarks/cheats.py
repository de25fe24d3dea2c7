"""Who finds which cheat, after how many rounds, and what does a cheat cost the run?

    python benchmarks/cheats.py

Eight members train a small Llama on the sources of Python's library by DisTrO, in this process, with real gradients;
one of them cheats (three where losses are compared). Claims, audits and evidence are those of runs; what differs
between processors is real, too: products in bfloat16, other micro-batches, other instructions in a process of its own.

    python benchmarks/cheats.py honest --seconds 900

makes one part of it. What the members do is in `cheat_fleet.py`, and what kinds of processors there are in
`cheat_processors.py`. More than 600 lines, since each part is a table of one fleet, and a defence a column of each.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
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
    SELDOM,
    SETTINGS,
    TOKENS,
    WITHIN,
    Fleet,
    begun_at,
    dense,
    diloco_figures,
    gradient_figures,
    worths,
)
from cheat_processors import PROCESSORS, band_for, measure_band
from report import spread, table, write_report
from torch import Tensor

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import (
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
    Worth,
    audit,
    check_evidence,
    draw_audits,
    figures_of,
    pack_evidence,
    refusal,
    rounds_to_detection,
    sign_claim,
    sign_finding,
    start_of,
)

CHEAT = 5
# In the mean over rounds, so many median distances below the median: who is so by gain or advantage is found by worth,
# once so many rounds were measured.
ODD, LEAST_ROUNDS = 3.0, 5
ROBUST = ("median", "trimmed_mean:0.25", "multi_krum:2", "krum", "geometric_median")
SHARES = (0.05, 0.1, 0.25)
# Of eight claims of a round, who looks at each.
LOOKING = (*6 * ("alike",), "micro-batches of 1", "products in bfloat16")
IDENTITIES = [Identity.generate() for _ in range(MEMBERS)]


def looked_at(made: Made, again: Tensor, band: Band) -> Audited:
    """Audit as an auditor does: with the momentum before; where bits differ, with those afterwards."""
    try:
        return audit(
            made.claim, made.coefficients, Material(made.material.before), again, LR, SETTINGS, band, is_agreed=True
        )  # fmt: skip
    except MaterialError:
        return audit(
            made.claim, made.coefficients, made.material, again, LR, SETTINGS, band, is_agreed=True
        )


def third_says(fleet: Fleet, seat: int, made: Made, data: bytes, accuser: str, band: Band) -> Named:
    """Judge the evidence as a third member that computes in other micro-batches; return whom it is against."""
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


class Standing:
    """Figures of how far members stand out by the worth of their results.

    Attributes:
        most: how far anybody did by gain and by advantage, once enough rounds were measured.
    """

    def __init__(self) -> None:
        self._gains, self._advantages, self._num_rounds = Watch(), Watch(), 0
        self.most = [-math.inf, -math.inf]

    def add(self, measured: dict[int, Worth]) -> set[int]:
        """The seats that are found by now, of those that were measured in this round."""
        self._gains.add({seat: each.gain for seat, each in measured.items()})
        self._advantages.add({seat: each.advantage for seat, each in measured.items()})
        self._num_rounds += 1
        if self._num_rounds < LEAST_ROUNDS:
            return set()
        found = set()
        for number, watch in enumerate((self._gains, self._advantages)):
            for seat in measured:
                self.most[number] = max(self.most[number], watch.oddness(seat))
                if watch.oddness(seat) >= ODD:
                    found.add(seat)
        return found


# Honest rounds


@dataclass
class Honest:
    """Outcome of honest rounds.

    Attributes:
        audits: of claims, by processors of several kinds in turn.
        equal: of these, bit for bit the same.
        accusations, doubts: of these.
        largest: bands that a claim was off at most, by the auditor's processor.
        refused: by each of the thresholds, vectors of members.
        vectors: of members that the thresholds were tried on.
        falsely_accused: members whom a lying auditor accused.
        named: accusers that a third has named for it.
        audit_seconds: of CPU, of all audits without the gradients.
        worth_seconds: of all measurements.
        by_worth: members that worth would accuse, counted in each round.
        standing: how far anybody stood out by it.
        loss: of what is held out, at the end.
    """

    rounds: int = 0
    audits: int = 0
    equal: int = 0
    accusations: int = 0
    doubts: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    vectors: int = 0
    falsely_accused: int = 0
    named: int = 0
    audit_seconds: float = 0.0
    worth_seconds: float = 0.0
    by_worth: int = 0
    standing: Standing = field(default_factory=Standing)
    loss: float = 0.0


def honest_rounds(seed: int, number: int, band: Band, until: float) -> tuple[Honest, list[Figures]]:
    """Every claim of every round is audited, each by the next kind of processor, and every result is measured."""
    found, figures = Honest(), []
    fleet = Fleet(seed)
    while found.rounds < number and (found.rounds < 10 or time.monotonic() < until):
        made = fleet.make({})
        for seat, each in made.items():
            name = LOOKING[(fleet.round + seat) % len(LOOKING)]
            again = fleet.own(seat, **PROCESSORS[name])
            began = time.process_time()
            audited = looked_at(each, again, band_for(name, band))
            found.audit_seconds += time.process_time() - began
            found.audits += 1
            found.equal += audited.is_equal
            found.largest[name] = max(found.largest.get(name, 0.0), audited.finding.excess)
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
        began = time.process_time()
        found.by_worth += len(found.standing.add(worths(fleet, made)))
        found.worth_seconds += time.process_time() - began
        fleet.apply(made)
        found.rounds += 1
        if found.rounds % 50 == 0:
            say(
                f"{found.rounds} honest rounds, {found.accusations} accusations, {found.standing.most}"
            )
    found.loss = LLAMA.loss(fleet.weights, LLAMA.held)
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
        accused: for each round, whether an auditor that looks at the claim accuses, by its processor.
        least: bands that a claim was off, the least of all rounds, by the same.
        confirmed: of the accusations, those that a third of another kind confirms.
        refused: rounds whose figures are beyond a threshold.
        by_cosine: round in which the cheat is first the oddest by that figure over the rounds.
        by_worth: round in which it is found by what its results are worth.
        others: honest members that are found so by then.
        gain, advantage: of its results, and of all others', in the mean.
    """

    accused: dict[str, list[bool]]
    least: dict[str, float]
    confirmed: list[bool]
    refused: list[bool]
    by_cosine: int | None = None
    by_worth: int | None = None
    others: set[int] = field(default_factory=set)
    gain: tuple[float, float] = (0.0, 0.0)
    advantage: tuple[float, float] = (0.0, 0.0)


AUDITORS = ("alike", "products in bfloat16")


def watched(kind: str, begun: Fleet, rounds: int, band: Band) -> Watched:
    fleet = copy.deepcopy(begun)
    found = Watched({name: [] for name in AUDITORS}, {}, [], [])
    cosines, standing = Watch(), Standing()
    own: list[Worth] = []
    beside: list[Worth] = []
    for number in range(1, rounds + 1):
        made = fleet.make({CHEAT: kind} if kind else {})
        cheated = made[CHEAT]
        for name, outcomes in found.accused.items():
            again = fleet.own(CHEAT, **PROCESSORS[name])
            audited = looked_at(cheated, again, band_for(name, band))
            outcomes.append(audited.finding.accuses)
            found.least[name] = min(found.least.get(name, 1e9), audited.finding.excess)
            if name == "alike" and audited.finding.accuses:
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
        measured = worths(fleet, made)
        own.append(measured[CHEAT])
        beside += [each for seat, each in measured.items() if seat != CHEAT]
        odd = standing.add(measured)
        found.others |= odd - {CHEAT}
        if found.by_cosine is None and number >= 3 and cosines.oddest(1) == [CHEAT]:
            found.by_cosine = number
        if found.by_worth is None and CHEAT in odd:
            found.by_worth = number
        fleet.apply(made)
    found.gain = mean(each.gain for each in own), mean(each.gain for each in beside)
    found.advantage = mean(each.advantage for each in own), mean(each.advantage for each in beside)
    return found


def rounds_until(kind: str, outcomes: Sequence[bool], share: float, draws: int) -> list[float]:
    """Rounds until a draw falls on the cheat in a round whose audit accuses: the seeds are those of `draw_audits`."""
    if not any(outcomes):
        return []
    found: list[float] = []
    seats = range(MEMBERS)
    for draw in range(draws):
        number = 0
        while True:
            seed = sha256(f"{kind} {share} {draw} {number}".encode()).digest()
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
    measures: bool = False,
    aggregator: str = "",
    band: Band | None = None,
) -> tuple[float, float | None, int]:
    """The loss of what is held out, the round in which the last cheat was found, and how many honest ones were.

    Args:
        share: of the claims that are audited; who is found is put out, and the others go on.
        measures: whether who is found by what its results are worth is put out, too.
    """
    fleet = copy.deepcopy(begun)
    cheats = dict.fromkeys(cheaters, kind) if kind else {}
    last, honest, standing = None, 0, Standing()
    for number in range(1, rounds + 1):
        made = fleet.make(cheats)
        found = set()
        if share:
            seed = (10**6 + number).to_bytes(32, "big")
            for each in draw_audits(seed, fleet.seats, fleet.seats, share):
                audited = looked_at(made[each.seat], fleet.own(each.seat), band or Band())
                if audited.finding.accuses:
                    found.add(each.seat)
        if measures:
            found |= standing.add(worths(fleet, made))
        fleet.apply(made, aggregator)
        for seat in found:
            if len(fleet.seats) == 2:
                break
            fleet.seats.remove(seat)
            honest += seat not in cheaters or not kind
            cheats.pop(seat, None)
            last = number
    return LLAMA.loss(fleet.weights, LLAMA.held), last if not cheats else None, honest


SETTING = (
    f"{MEMBERS} members, a Llama of 2 layers, hidden size 32, {SETTINGS.num_elements:,} parameters, batches of "
    f"{ROWS} x {TOKENS} bytes a member and round, DisTrO with the {SETTINGS.top_k} greatest of chunks up to "
    f"{SETTINGS.max_side} x {SETTINGS.max_side} as signs, decay {SETTINGS.decay}, lr {LR:g}."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "part",
        nargs="*",
        metavar="PART",
        default=[*PARTS],
        help=f"of {', '.join(PARTS)}; all if none",
    )
    parser.add_argument("--honest", type=int, default=1000, help="rounds, each claim audited")
    parser.add_argument(
        "--before", type=int, default=20, help="honest rounds before a cheat begins"
    )
    parser.add_argument("--rounds", type=int, default=20, help="with a cheat, each looked at")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cheat")
    parser.add_argument("--draws", type=int, default=300, help="draws of auditors for each run")
    parser.add_argument("--end", type=int, default=60, help="rounds until losses are compared")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="after which no other honest round begins"
    )
    options = parser.parse_args()
    if not set(options.part) <= set(PARTS):
        parser.error(f"there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    begun = [begun_at(seed + 1, options.before) for seed in range(options.seeds)]
    early, late = Fleet(1), copy.deepcopy(begun[0])
    has_audits = bool(AUDITED & set(options.part))
    for _ in range(options.before if has_audits else 0):
        late.apply(late.make({}))
    states = [early, begun[0], late]
    band, processors = measure_band(states) if has_audits else (Band(), [])
    widths = (band.angle, band.log_ratio, band.tensor_angle, band.tensor_log_ratio)
    apart_at_most = [
        "## What honest processors are apart",
        f"The same rows on the same weights, beside one thread in float32; largest of {4 * len(states)} gradients, "
        f"of {len(states)} states from the first round to the {2 * options.before}th.",
        table(
            ["processor", "same bits", "angle", "log ratio", "tensor's angle", "its log ratio"],
            processors,
        ),
        "The band between the kinds of float32, eight times as wide as the widest of each: "
        + ", ".join(f"{each:.1e}" for each in widths)
        + ". Auditors in bfloat16 have the default one.",
    ]
    if has_audits:
        say("band measured")
    for part in options.part:
        name, sections = PARTS[part](options, begun, band)
        cpu = f"CPU time: {time.process_time():.0f} s."
        apart_told = apart_at_most if part in AUDITED else []
        write_report(name, SETTING, "\n\n".join([*apart_told, *sections, cpu]))


def honest_part(options: Any, begun: Sequence[Fleet], band: Band) -> tuple[str, list[str]]:
    figures = [
        threshold_row("gradients", gradient_figures(copy.deepcopy(begun[0]))),
        threshold_row("differences of 20 steps (DiLoCo)", diloco_figures()),
    ]
    until = time.monotonic() + options.seconds
    runs = []
    for seed in range(1, options.seeds + 1):
        honest, of_distro = honest_rounds(seed, options.honest, band, until)
        runs.append(honest)
        figures.append(threshold_row(f"signs of DisTrO, seed {seed}", of_distro))
    rows = [
        [
            str(seed),
            f"{each.rounds:,}",
            f"{each.audits:,}",
            str(each.accusations),
            str(each.doubts),
            f"{each.equal:,}",
            ", ".join(f"{off:.2f} ({name})" for name, off in each.largest.items()),
            f"{each.named} of {each.falsely_accused}",
            str(each.by_worth),
            f"{each.standing.most[0]:.2f}, {each.standing.most[1]:.2f}",
            f"{each.loss:.3f}",
        ]
        for seed, each in enumerate(runs, 1)
    ]
    auditing = 1000 * sum(r.audit_seconds for r in runs) / sum(r.audits for r in runs)
    measuring = 1000 * sum(r.worth_seconds for r in runs) / sum(r.audits for r in runs)
    return "cheats-honest", [
        "## Honest rounds",
        "Each claim of each round is audited, 6 of 8 by processors alike, 1 in bfloat16, 1 in micro-batches of 1; off "
        "by so many bands at most. Each result is measured, too: by worth a member is accused where it is "
        f"{ODD:g} median distances below the median, in the mean over rounds, in a round from the {LEAST_ROUNDS}th on; "
        "beside that is how far anybody was, by gain and by advantage. Of false accusations that an auditor of an "
        "honest claim has signed, a third named the accuser. Loss is that of what is held out, at the end.",
        table(
            ["seed", "rounds", "audits", "accusations", "doubts", "same bits", "bands off", "accuser named", "by worth",
             "most odd", "loss"],
            rows,
        ),
        f"An audit takes {auditing:.0f} ms of CPU beside the gradient, a measurement {measuring:.0f} ms.",
        "## Thresholds (NeuroShard's) on honest members",
        "Each beside the mean of the others; median (minimum to maximum).",
        table(
            ["vectors", "number", "cosine", "ratio of norms", "of variances", "refused"], figures
        ),
    ]  # fmt: skip


def cheats_part(options: Any, begun: Sequence[Fleet], band: Band) -> tuple[str, list[str]]:
    rows = [cheat_row(kind, begun, options.rounds, options.draws, band) for kind in ("", *CHEATS)]
    found = [f"found at {share:.0%}" for share in SHARES]
    return "cheats", [
        "## Cheats",
        f"One of {MEMBERS} cheats in every round after {options.before} honest ones, {options.rounds} rounds, "
        f"{options.seeds} seeds. Thresholds: share of its vectors that are refused. Oddest: rounds until the cheat is "
        "the oddest of all by its cosines (worst of the seeds, or in how many it ever was; at least 3 rounds are "
        f"looked at). By worth: rounds until it is {ODD:g} median distances below the median, in the mean over rounds, "
        f"by gain or by advantage (the same; at least {LEAST_ROUNDS} rounds), where every round is measured; with a "
        "share of them as many times more. In brackets honest members that were, of all seeds. Gain and advantage: of "
        "its results, and of the others'. Rounds until found: every claim of the cheat "
        f"was audited, and {options.draws} draws a seed say which of these audits would have been made: median (19 of "
        "20 found by). Audits that accuse, of processors alike and in bfloat16, and how many bands the claims were "
        "off at least. Confirmed: accusations that a third confirmed who computes in micro-batches of 1.",
        table(
            ["cheat", "thresholds", "oddest by cosine", "by worth", "gain", "advantage", *found, *AUDITORS,
             "off, alike", "off, bfloat16", "confirmed"],
            rows,
        ),
        f"By the formula the mean is {', '.join(f'{rounds_to_detection(s):.0f}' for s in SHARES)} rounds at these "
        f"shares, the median {by_formula(0.5)}, and 19 of 20 are found by {by_formula(0.05)}.",
        "## Witnesses that lie",
        f"A member that cheats in each round, and one other auditor of {MEMBERS - 1} that says that its claims hold. "
        "Rounds until an honest auditor is drawn: median (19 of 20 by), mean, mean by the formula; and how often the "
        "one that lied was drawn for the same claim, and so is named with it.",
        table(
            ["share", "auditors of a claim", "rounds", "mean", "formula", "liar named, too"],
            lying_auditors(2000),
        ),
    ]  # fmt: skip


def by_formula(left: float) -> str:
    """Rounds after which at most this share of cheats is not found, at each share of audits."""
    return ", ".join(f"{math.ceil(math.log(left) / math.log(1 - share))}" for share in SHARES)


def losses_part(options: Any, begun: Sequence[Fleet], band: Band) -> tuple[str, list[str]]:
    return "cheats-losses", [
        "## What it costs",
        f"Loss of what is held out {options.end} rounds after three of {MEMBERS} began to cheat: mean of {len(begun)} "
        "seeds (minimum to maximum). Audits are of 10 % of the claims, worth is measured in every round; who is found "
        "goes. In brackets is the round in which the last of the three went, in the worst of the seeds, or in how "
        "many seeds all went; and how many honest members went, of all seeds, where any did. Robust aggregates are of "
        "the coefficients, without audits.",
        table(
            ["cheat", "mean", "mean, audits", "mean, worth", *ROBUST],
            loss_rows(begun, options.end, band),
        ),
    ]


def worth_part(options: Any, begun: Sequence[Fleet], band: Band) -> tuple[str, list[str]]:
    rows: list[list[str]] = []
    until = time.monotonic() + options.seconds
    for kind in ("", *CHEATS):
        if rows and time.monotonic() > until:
            break
        runs = [by_worth(kind, fleet, options.rounds) for fleet in begun]
        found = [each.found for each in runs if each.found]
        others = sum(len(each.others) for each in runs)
        rows.append(
            [
                kind or "none",
                f"{max(found)}" if len(found) == len(runs) else f"in {len(found)} of {len(runs)}",
                str(others),
                *(f"{mean(getattr(run, what) for run in runs):+.4f}" for what in ALONE),
                f"{max(run.standing.most[0] for run in runs):.2f}",
                f"{max(run.standing.most[1] for run in runs):.2f}",
            ]
        )
        say(" | ".join(rows[-1]))
    standing, number, wrong, fleet = Standing(), 0, 0, Fleet(1)
    while number < options.honest and time.monotonic() < until:
        made = fleet.make({})
        wrong += len(standing.add(worths(fleet, made)))
        fleet.apply(made)
        number += 1
        if number % 25 == 0:
            say(f"{number} honest rounds, {wrong} found, {standing.most}")
    return "cheats-worth", [
        "## By worth",
        f"One of {MEMBERS} cheats in every round after {options.before} honest ones, {options.rounds} rounds, "
        f"{options.seeds} seeds, every round measured; with a share of them as many times more. Found: the round in "
        f"which it is {ODD:g} median distances below the median, in the mean over rounds, by gain or by advantage, "
        f"from the {LEAST_ROUNDS}th round on (worst of the seeds, or in how many it was); others: honest members that "
        "were. Gain and advantage: of its results, and of the others', in the mean; and how far anybody was below the "
        "median.",
        table(
            ["cheat", "found", "others", "gain", "others' gain", "advantage", "others' advantage", "most by gain",
             "most by advantage"],
            rows,
        ),
        f"{number:,} honest rounds of a run from its beginning: {wrong} times a member was found; at most it was "
        f"{standing.most[0]:.2f} below the median by gain, and {standing.most[1]:.2f} by advantage.",
    ]  # fmt: skip


@dataclass
class ByWorth:
    """One cheat over some rounds, for one seed, by what results are worth alone.

    Attributes:
        found: the round in which it is; None for none.
        others: honest members that are.
        gain, others_gain, advantage, others_advantage: in the mean.
    """

    standing: Standing
    found: int | None
    others: set[int]
    gain: float
    others_gain: float
    advantage: float
    others_advantage: float


ALONE = ("gain", "others_gain", "advantage", "others_advantage")


def by_worth(kind: str, begun: Fleet, rounds: int) -> ByWorth:
    fleet, standing, found, others = copy.deepcopy(begun), Standing(), None, set[int]()
    own: list[Worth] = []
    beside: list[Worth] = []
    for number in range(1, rounds + 1):
        made = fleet.make({CHEAT: kind} if kind else {})
        measured = worths(fleet, made)
        odd = standing.add(measured)
        found = number if found is None and CHEAT in odd else found
        others |= odd - {CHEAT}
        own.append(measured[CHEAT])
        beside += [each for seat, each in measured.items() if seat != CHEAT]
        fleet.apply(made)
    return ByWorth(
        standing, found, others, mean(e.gain for e in own), mean(e.gain for e in beside),
        mean(e.advantage for e in own), mean(e.advantage for e in beside),
    )  # fmt: skip


PARTS = {"cheats": cheats_part, "honest": honest_part, "losses": losses_part, "worth": worth_part}
# Those in which bands matter.
AUDITED = {"cheats", "honest", "losses"}


def say(what: str) -> None:
    print(f"{what} at {time.process_time():.0f} s of CPU", file=sys.stderr, flush=True)


def cheat_row(kind: str, begun: Sequence[Fleet], rounds: int, draws: int, band: Band) -> list[str]:
    runs = [watched(kind, fleet, rounds, band) for fleet in begun]
    say(kind or "none")

    def share(values: list[bool]) -> str:
        return f"{100 * mean(values):.0f} %" if values else "none"

    def first(values: list[int | None]) -> str:
        known = [each for each in values if each is not None]
        return f"{max(known)}" if len(known) == len(values) else f"in {len(known)} of {len(values)}"

    cells = [kind or "none", share([each for run in runs for each in run.refused])]
    cells.append(first([run.by_cosine for run in runs]))
    others = sum(len(run.others) for run in runs)
    cells.append(first([run.by_worth for run in runs]) + (f" ({others})" if others else ""))
    for pairs in ([run.gain for run in runs], [run.advantage for run in runs]):
        own, beside = (mean(each[part] for each in pairs) for part in (0, 1))
        cells.append(f"{own:+.4f}, {beside:+.4f}")
    for part in SHARES:
        until = sorted(
            each for run in runs for each in rounds_until(kind, run.accused["alike"], part, draws)
        )
        cells.append(
            f"{median(until):.0f} ({until[int(0.95 * len(until))]:.0f})" if until else "never"
        )
    cells += [share([each for run in runs for each in run.accused[name]]) for name in AUDITORS]
    cells += [f"{min(run.least[name] for run in runs):.2g}" for name in AUDITORS]
    confirmed = [each for run in runs for each in run.confirmed]
    cells.append(f"{sum(confirmed)} of {len(confirmed)}")
    return cells


def loss_rows(begun: Sequence[Fleet], rounds: int, band: Band) -> list[list[str]]:
    """One cheat a row; of aggregators only for cheats that they are about, and for none."""
    three = (3, CHEAT, 6)

    def cell(kind: str, *, is_defended: bool = False, **more: Any) -> str:
        found = [final_loss(each, kind, three, rounds, **more) for each in begun]
        losses, lasts = [each[0] for each in found], [each[1] for each in found if each[1]]
        told = f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        if is_defended:
            if kind:
                all_went = len(lasts) == len(found)
                told += f" ({max(lasts)})" if all_went else f" (in {len(lasts)} of {len(found)})"
            honest = sum(each[2] for each in found)
            told += f", {honest} honest" if honest else ""
        return told

    rows = []
    for kind in ("", *(each for each in CHEATS if each not in (WITHIN, SELDOM))):
        row = [kind or "none", cell(kind)]
        row.append(cell(kind, is_defended=True, share=0.1, band=band) if kind else "")
        row.append(cell(kind, is_defended=True, measures=True))
        has_robust = kind in ("", "sign flipped", "noise")
        row += [cell(kind, aggregator=each) if has_robust else "" for each in ROBUST]
        rows.append(row)
        say(f"losses: {kind or 'none'}")
    return rows


if __name__ == "__main__":
    main()
