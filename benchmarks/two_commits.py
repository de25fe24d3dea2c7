"""Is one commit slower than another? Both are alive at once, and do a round each in turn.

    python benchmarks/two_commits.py BEFORE AFTER decode sessions-8 65536 1048576 [--rounds 30] [--no-file]

`decode`: tokens a second of a Llama of 8 layers, hidden size 512, over two workers, as `decode.py` has it.
`sessions-N`: the same of N sessions at once, as `sessions.py` has it. A number: MB a second of messages of so many
bytes between two processes, through `Protocol` 1.1.0, as `transport.py` has it. Each commit has a worktree of its own
and its own copy of these three files; one machine that drifts drifts for both, which a run of one after the other does
not give. A pair is one round of each; the order changes with each pair. Products are torch's own: kernels are not
compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Final

import trio

ROOT: Final = Path(__file__).parents[1]
BYTES_A_ROUND: Final = 600_000_000
PROMPT_TOKENS, NEW_TOKENS = 128, 64
SIZE: Final = "512x8"
# For a side to end. Seconds.
TIMEOUT: Final = 120.0

Round = Callable[[], Awaitable[float]]


# ---------------------------------------------------------------------------------------------- one side


async def _serve_rounds(a_round: Round) -> None:
    """Answer each line of stdin with the figure of a round."""
    await a_round()
    print("ready", flush=True)
    async for _ in _lines():
        print(json.dumps(await a_round()), flush=True)


async def _lines() -> AsyncIterator[str]:
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        yield line


async def _decode_side(model: Path) -> None:
    import decode  # of the commit

    from neurogrid import CoordinatorSettings, open_coordinator

    draw = random.Random(1)
    prompt = [draw.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    with decode.workers(2) as addresses:
        settings = CoordinatorSettings(
            model=model, peers=tuple(addresses), stages=2, max_seq_len=2048, prefix_reuse=False
        )
        async with open_coordinator(settings) as coordinator:

            async def a_round() -> float:
                timing, _ = await decode.time_ours(coordinator, prompt, NEW_TOKENS)
                return timing.rate

            await _serve_rounds(a_round)


async def _sessions_side(model: Path, count: int) -> None:
    import decode  # of the commit
    import sessions

    from neurogrid import CoordinatorSettings, open_coordinator

    draw = random.Random(1)
    prompts = [[draw.randrange(2, 32_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    with decode.workers(2) as addresses:
        settings = CoordinatorSettings(
            model=model,
            peers=tuple(addresses),
            stages=2,
            max_seq_len=PROMPT_TOKENS + NEW_TOKENS,
            max_sessions=count,
            prefix_reuse=False,
        )
        async with open_coordinator(settings) as coordinator:

            async def a_round() -> float:
                rate, _, tokens = await sessions.rate(coordinator, prompts, NEW_TOKENS)
                assert all(len(each) == NEW_TOKENS for each in tokens)
                return rate

            await _serve_rounds(a_round)


async def _transport_side(size: int) -> None:
    import transport  # of the commit

    with transport._children(["--serve", transport.OURS]) as (address, _):
        async with transport.ROWS[transport.OURS][2](address) as client:

            async def a_round() -> float:
                count = BYTES_A_ROUND // size
                return count * size / await client.throughput(size, count) / 1e6

            await _serve_rounds(a_round)


# ---------------------------------------------------------------------------------------------- both


class Side:
    """One commit's process."""

    def __init__(self, tree: Path, what: str, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", str(tree), what, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree / "benchmarks",
            env={
                **os.environ,
                "PYTHONPATH": f"{tree / 'benchmarks'}{os.pathsep}{tree}",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        assert self._read() == "ready"

    def a_round(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("a side has ended, as it said above")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    """The files of a commit in a directory."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compare(trees: list[Path], what: str, model: Path, rounds: int) -> tuple[str, ...]:
    """A row: both commits' figures, and the ratio of the later one's to the earlier one's."""
    from report import spread

    with ExitStack() as stack:
        sides = []
        for tree in trees:
            sides.append(Side(tree, what, model))
            stack.callback(sides[-1].close)
        found: list[list[float]] = [[], []]
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                found[index].append(sides[index].a_round())
    ratios = [after / before for before, after in zip(*found, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return (
        f"{int(what):,} B" if what.isdecimal() else what,
        *(spread(each).show() for each in found),
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
        f"{spread(found[1]).middle / spread(found[0]).middle:.3f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("what", nargs="+", help="decode, sessions-N, or bytes of a message")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    from report import table, write_report

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = Path(scratch)
        trees = [
            stack.enter_context(worktree(commit, directory / f"tree-{number}"))
            for number, commit in enumerate((options.before, options.after))
        ]
        model = directory / "model"
        if not all(map(str.isdecimal, options.what)):
            import decode

            decode.make_model(decode.SIZES[SIZE], model)
        rows = [compare(trees, what, model, options.rounds) for what in options.what]
    header = ("what", options.before, options.after, "ratio, of pairs (quartiles)", "of medians")
    text = (
        f"{table(header, rows)}\n\nTokens a second, or MB a second: median (least to most) of {options.rounds} rounds "
        "of each. A ratio above 1 says that the later one is faster.\n"
    )
    if options.no_file:
        print(text)
    else:
        write_report("two-commits", (__doc__ or "").partition("\n")[0], text)


def _be_a_side(tree: str, what: str, model: str) -> None:
    sys.path[0] = str(Path(tree) / "benchmarks")
    if what == "decode":
        trio.run(_decode_side, Path(model))
    elif what.isdecimal():
        trio.run(_transport_side, int(what))
    else:
        trio.run(_sessions_side, Path(model), int(what.removeprefix("sessions-")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        _be_a_side(*sys.argv[2:])
    else:
        main()
