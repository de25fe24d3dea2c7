"""What does `--verify` cost, how soon is a worker found that computes wrong, and is an honest one ever taken for it?

    python benchmarks/verification.py --parts cost,honest,found

cost: tokens a second of several clients over two workers and a replica, by the share that is verified and by who
computes it again, in turns of one run; a turn ends when all that it drew is verified.

honest: steps of honest workers, all of them verified: with our kernels, and with torch's products at one of the two;
how far their rows are from those that verify them, beside the band.

found: for each kind of wrong worker (`tests/e2e/wrong_worker.py`) how many generations and tokens until it is named. A
session that is not drawn tells nothing, so that those between are drawn by seed and not run; one that is drawn is run,
with real workers. The worker is named and stays, so that the next trial finds it there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from decode import SIZES, make_model
from report import spread, table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.verification.bands import row_differences
from neurogrid.inference.verification.suspicion import Suspicion
from neurogrid.inference.verification.verifier import Verification
from tests.e2e.preloaded import WORKER, Popen

WRONG = (sys.executable, "-m", "tests.e2e.wrong_worker")
SHARES = (0.01, 0.05, 0.2, 1.0)
# As layers are computed, what they are held as, and what activations travel in.
FORMS = (
    ("float32", None, None),
    ("bfloat16", None, None),
    ("float16", None, None),
    ("float32", "int8", None),
    ("bfloat16", "int8", None),
    ("bfloat16", "int4", None),
    ("float32", None, "int8"),
    ("bfloat16", None, "int8"),
)
KINDS = ("flip", "noise", "skip", "stale", "later:20", "sometimes:20")
PROMPT_TOKENS = 32
READY_TIMEOUT = 300.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default="cost,honest,found")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--generations", type=int, default=40, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--honest-steps", type=int, default=500)
    parser.add_argument("--size", choices=SIZES, default="512x8")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(SIZES[options.size], directory / "model")
        for part, run in (("found", found), ("cost", cost), ("honest", honest)):
            if part in parts:
                trio.run(run, directory, options)


# ------------------------------------------------------------------ workers


@contextmanager
def workers(
    directory: Path, *programs: Sequence[str], process_ids: list[int] | None = None
) -> Iterator[list[str]]:
    """Worker processes; gives their addresses, and adds their ids."""
    with ExitStack() as stack:
        processes = []
        for number, program in enumerate(programs):
            log = stack.enter_context((directory / f"worker-{number}.log").open("w"))
            processes.append(
                Popen(
                    [*program, "--port", "0", "--no-cache"],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=directory,
                )
            )
        if process_ids is not None:
            process_ids += [process.pid for process in processes]
        try:
            addresses = []
            for process in processes:
                assert process.stdout is not None
                addresses.append(process.stdout.readline().strip())
            yield addresses
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def settings(directory: Path, addresses: Sequence[str], **more: Any) -> CoordinatorSettings:
    """Two stages, and whoever is left over stands by."""
    return CoordinatorSettings(
        model=directory / "model",
        peers=tuple(addresses),
        **{"stages": 2, "max_seq_len": 256, "max_sessions": 8, **more},
    )


async def ready(coordinator: Coordinator, count: int) -> None:
    """Wait until so many hold layers."""
    with trio.fail_after(READY_TIMEOUT):
        while len(coordinator.fleet.holdings) < count:
            await trio.sleep(0.05)


async def generate(coordinator: Coordinator, chance: random.Random, num_tokens: int) -> int:
    """One generation for a prompt of its own; returns its tokens."""
    prompt = [chance.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    return len([t async for t in coordinator.generate(prompt, max_tokens=num_tokens)])


async def drained(verification: Verification) -> None:
    """Wait until all that is over is verified."""
    while verification.num_waiting:
        await trio.sleep(0.005)


def verification_of(coordinator: Coordinator) -> Verification:
    assert coordinator.verification is not None
    return coordinator.verification


# ------------------------------------------------------------------ what it costs


async def cost(directory: Path, options: argparse.Namespace) -> None:
    shares = [share for share in SHARES if share * options.generations >= 1]
    arms = [(False, 0.0), *((is_own, share) for share in shares for is_own in (False, True))]
    turns: dict[tuple[bool, float], list[Turn]] = {arm: [] for arm in arms}
    process_ids = [os.getpid()]
    with workers(directory, *[WORKER] * 3, process_ids=process_ids) as addresses:
        board = StatusBoard()
        wanted = settings(directory, addresses, verify=1.0)
        async with open_coordinator(wanted, board=board) as coordinator:
            await ready(coordinator, 3)
            chance = random.Random(options.seed)
            # The coordinator's own computation is made ready, as it is once it has been used.
            await turn(coordinator, board, chance, options, (True, 1.0), process_ids, 2)
            for number in range(options.rounds):
                for arm in arms if number % 2 == 0 else arms[::-1]:
                    made = await turn(
                        *(coordinator, board, chance, options, arm, process_ids),
                        options.generations,
                    )
                    turns[arm].append(made)
                    print(arm, made, file=sys.stderr, flush=True)
                write_cost(options, turns)
            assert not board.verification.wrong


def write_cost(options: argparse.Namespace, turns: dict[tuple[bool, float], list[Turn]]) -> None:
    base = turns[False, 0.0]
    rows = []
    for (is_own, share), made in turns.items():
        rate = median(each.rate for each in made) / median(each.rate for each in base)
        used = median(each.used for each in made) / median(each.used for each in base)
        rows.append(
            (
                "nobody" if not share else "the coordinator" if is_own else "another worker",
                f"{share:.0%}",
                spread([each.rate for each in made]).show(1),
                f"{rate:.3f}",
                spread([1000 * each.used for each in made]).show(2),
                f"{used:.3f}",
                f"{sum(each.num_steps for each in made):,}",
            )
        )
    body = table(
        (
            *("computes again", "verified", "tokens/s", "of 0 %", "CPU s for 1,000 tokens"),
            *("of 0 %", "steps verified"),
        ),
        rows,
    )
    write_report(
        f"verification-cost-{options.size}",
        "How many tokens a second do two stages make while a share of their sessions is computed again?",
        f"A Llama of random weights, {options.size}, float32; two stages in a chain and a replica of both; "
        f"{options.clients} clients, prompts of {PROMPT_TOKENS} tokens, answers of {options.tokens}; "
        f"{len(base)} turns of {options.generations} generations for each, in alternating order in one run; a turn "
        "ends when what it drew is verified. One thread a process. In each turn the share is met exactly, by seed. "
        "CPU: of all processes, the coordinator's and the workers'. Others were at work on the machine, so that the "
        f"CPU's time says more than the clock's.\n\n{body}",
    )


@dataclass(frozen=True)
class Turn:
    """Tokens a second, and CPU seconds a token, of one turn; and the steps that were verified in it."""

    rate: float
    used: float
    num_steps: int


async def turn(
    coordinator: Coordinator,
    board: StatusBoard,
    chance: random.Random,
    options: argparse.Namespace,
    arm: tuple[bool, float],
    process_ids: Sequence[int],
    num_generations: int,
) -> Turn:
    is_own, share = arm
    verification = verification_of(coordinator)
    verification.suspicion = Suspicion(share)
    verification.suspicion.is_own = lambda chance: is_own  # type: ignore[method-assign]
    drawn = set(chance.sample(range(num_generations), round(share * num_generations)))
    left = iter(range(num_generations))
    num_tokens = 0

    async def client() -> None:
        nonlocal num_tokens
        for number in left:
            # Asked at once, before anything is waited for.
            is_drawn = number in drawn
            verification.suspicion.draws = lambda chance: is_drawn  # type: ignore[method-assign] # noqa: B023
            num_tokens += await generate(coordinator, chance, options.tokens)

    steps = board.verification.num_steps
    used, started = cpu_seconds(process_ids), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(options.clients):
            nursery.start_soon(client)
    await drained(verification)
    seconds = time.perf_counter() - started
    used = cpu_seconds(process_ids) - used
    return Turn(num_tokens / seconds, used / num_tokens, board.verification.num_steps - steps)


def cpu_seconds(process_ids: Sequence[int]) -> float:
    """Seconds of the CPU that these processes have used."""
    ticks = 0
    for process_id in process_ids:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------ honest workers


async def honest(directory: Path, options: argparse.Namespace) -> None:
    rows = []
    torchs = ("env", "NEUROGRID_KERNELS=none", *WORKER)
    with workers(directory, WORKER, torchs, WORKER) as addresses:
        for dtype, quantize, wire in FORMS:
            board = StatusBoard()
            wanted = settings(
                directory, addresses, verify=1.0, dtype=dtype, quantize=quantize, wire_dtype=wire
            )
            async with open_coordinator(wanted, board=board) as coordinator:
                await ready(coordinator, 3)
                verification = verification_of(coordinator)
                # Half by another worker, half by the coordinator.
                verification.suspicion.is_own = lambda chance: chance < 0.5  # type: ignore[method-assign]
                apart = watch_differences(verification)
                chance = random.Random(options.seed)
                while board.verification.num_steps < options.honest_steps:
                    async with trio.open_nursery() as nursery:
                        for _ in range(options.clients):
                            nursery.start_soon(generate, coordinator, chance, options.tokens)
                    await drained(verification)
                known = board.verification
            rows.append(
                (
                    f"{dtype}{f', {quantize}' if quantize else ''}",
                    wire or "the same",
                    f"{known.num_steps:,}",
                    str(known.num_differing),
                    str(len(known.wrong)),
                    f"{max(apart):.2g}",
                    f"{verification._greatest(verification._routing.wire):.2g}",
                )
            )
            print(rows[-1], file=sys.stderr, flush=True)
    body = table(
        (
            *("computed in", "travels in", "steps verified", "differ", "workers named"),
            *("rows apart at most", "band"),
        ),
        rows,
    )
    write_report(
        f"verification-honest-{options.size}",
        "Is an honest worker taken for a wrong one, and how far apart are honest workers?",
        f"A Llama of random weights, {options.size}; two stages in a chain and a replica of both, {options.clients} "
        "sessions at once; every session is verified, each stage by the replica or by the coordinator, by chance. One "
        "of the workers has torch's products in place of our kernels, so that sums are made in another order. Rows: "
        "the norm of the difference by that of the row, of each token. Others were at work on the machine.\n\n"
        f"{body}",
    )


def watch_differences(verification: Verification) -> list[float]:
    """Note how far apart rows are that are compared."""
    found: list[float] = []
    compare: Callable[..., Any] = verification.differing

    def differing(item: Any, seen_BTD: torch.Tensor, right_BTD: torch.Tensor) -> Any:
        found.append(float(row_differences(seen_BTD, right_BTD).max()))
        return compare(item, seen_BTD, right_BTD)

    verification.differing = differing  # type: ignore[method-assign]
    return found


# ------------------------------------------------------------------ wrong workers


async def found(directory: Path, options: argparse.Namespace) -> None:
    rows: list[Sequence[str]] = []
    # Weights are wrong from when they are loaded; the rest may change.
    files = {"": directory / "any", "skip": directory / "skip", "stale": directory / "stale"}
    for kind, file in files.items():
        file.write_text(kind)
    odd = [(*WRONG, str(file)) for file in files.values()]
    with workers(directory, *odd, WORKER) as addresses:
        for number, own in enumerate(files):
            kinds = (own,) if own else tuple(kind for kind in KINDS if kind not in files)
            there = [addresses[number], addresses[-1]]
            # Prompts are the same for each kind: none goes on from what another left.
            wanted = settings(directory, there, verify=1.0, prefix_reuse=False)
            async with open_coordinator(wanted) as coordinator:
                await ready(coordinator, 2)
                peer_id = addresses[number].rpartition("/")[2]
                for kind in kinds:
                    trials = await try_kind(coordinator, kind, peer_id, files[own], options)
                    for share in SHARES:
                        counted = trials.generations(share, random.Random(options.seed))
                        num_tokens = answer_tokens(kind, options)
                        rows.append(
                            (
                                kind,
                                str(num_tokens),
                                f"{share:.0%}",
                                f"{len(counted)} of {options.trials}",
                                spread(trials.drawn()).show(0),
                                spread(counted).show(0),
                                f"{median(counted) * (PROMPT_TOKENS + num_tokens):,.0f}",
                                f"{median(trials.seconds):.2f}",
                                f"{max(trials.apart):.2g}",
                            )
                        )
                        print(rows[-1], file=sys.stderr, flush=True)
                    write_found(options, rows)


def answer_tokens(kind: str, options: argparse.Namespace) -> int:
    """Tokens of an answer: few, where one step tells."""
    return options.tokens if ":" in kind else 4


def write_found(options: argparse.Namespace, rows: Sequence[Sequence[str]]) -> None:
    body = table(
        (
            *(
                "wrong",
                "tokens",
                "verified",
                "named",
                "verified until then",
                "generations until then",
            ),
            *("tokens until then", "s from a session's end", "rows apart at most"),
        ),
        rows,
    )
    write_report(
        f"verification-found-{options.size}",
        "After how many generations is a worker named that computes wrong?",
        f"A Llama of random weights, {options.size}, float32; two workers in a chain, one of them wrong; the "
        f"coordinator computes again. Prompts of {PROMPT_TOKENS} tokens and answers as long as told, one after the "
        "other. A session that is not drawn tells nothing of anybody: those are drawn by seed, and not run. "
        "`sometimes:20` is wrong in one of 20 steps, by chance; `later:20` from its twentieth step on. In no trial the "
        "honest worker was named. Median, least and most; seconds: from the end of a session that was drawn until it "
        f"was judged. Others were at work on the machine.\n\n{body}",
    )


@dataclass
class Trials:
    """Outcome of the trials of one kind.

    Attributes:
        counts: of each: sessions that were drawn until the worker was named or suspected; and after that.
        seconds: from the end of each session that was drawn until it was judged.
        apart: rows that were compared, at most.
    """

    counts: list[tuple[int, int]]
    seconds: list[float]
    apart: list[float]

    def drawn(self) -> list[int]:
        """Sessions that were verified, of each trial."""
        return [before + after for before, after in self.counts]

    def generations(self, share: float, chance: random.Random) -> list[int]:
        """Generations of each trial, those that were not drawn included; while there are suspects all are."""
        return [
            after + sum(_until_drawn(share, chance) for _ in range(before))
            for before, after in self.counts
        ]


def _until_drawn(share: float, chance: random.Random) -> int:
    return next(number for number in count(1) if chance.random() < share)


async def try_kind(
    coordinator: Coordinator, kind: str, peer_id: str, file: Path, options: argparse.Namespace
) -> Trials:
    verification = verification_of(coordinator)
    # Named, and kept: for the next trial.
    verification._fleet.exclude = lambda peer_id, reason: None  # type: ignore[method-assign]
    found = Trials([], [], watch_differences(verification))
    chance = random.Random(options.seed)
    for _ in range(options.trials):
        if kind.startswith("later"):  # it counts from when it is told so
            file.write_text("")
            verification.suspicion = Suspicion(0.0)
            await generate(coordinator, chance, 1)
        file.write_text(kind)
        verification.suspicion = Suspicion(1.0)
        verification._routing.distrusted = frozenset()
        before = after = 0
        while not verification.suspicion.wrong:
            before, after = (
                (before, after + 1) if verification.suspicion.suspects else (before + 1, after)
            )
            await generate(coordinator, chance, answer_tokens(kind, options))
            ended = time.perf_counter()
            await drained(verification)
            found.seconds.append(time.perf_counter() - ended)
        assert verification.suspicion.wrong == {peer_id}
        found.counts.append((before, after))
    return found


if __name__ == "__main__":
    main()
