"""What does a whole run keep of the speed that its members have by themselves?

    python benchmarks/training_speed.py overhead two uneven [--repeats 3] [--keep FILE] [--shares 262144]

`overhead`: one member beside a plain torch loop that learns from the same batches in the same order, at the same time,
each on a core of its own, which they swap. `two`: two members with half a core each, and one; `uneven`: four members
with CPU quotas, alone and together, with projection and without. All are real processes: leader, workers and their
trainers, over 127.0.0.1. Quotas take root, and cgroups of version 1. Where others use the machine, `--shares` puts all
that is measured before them; with `--keep`, it may be measured in several sittings, and all are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trio
from report import spread, table, write_report
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.training.data.dealing import Dealer
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import open_slice, read_manifest, slice_path
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.testnet.plan import LEADER
from neurogrid.training.testnet.processes import Processes, ProcessSettings

SOURCE = Path(__file__).parents[1] / "neurogrid"
LENGTH = 256  # tokens of a sample
BATCH, UNEVEN_BATCH = 8, 4  # samples of a batch
INNER = InnerSection(lr=1e-3, schedule="constant")
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
RUN_FILE = """
[model]
config = "{model}"
[data]
path = "{data}"
[stop]
rounds = 1000
[inner]
schedule = "constant"
batch_tokens = {batch_tokens}
"""
# Of a core: speeds of 1, 1, 1/2 and 1/5, which on two cores do not compete.
QUOTAS = (0.4, 0.4, 0.2, 0.08)
CGROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
PERIOD = 100_000  # microseconds
TICK = 0.02
DEADLINE = 300.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


Samples = dict[str, list[dict[str, float]]]
"""Measurements of each thing, one for each repeat."""


def main() -> None:
    if sys.argv[1:2] == ["--plain"]:
        plain_loop(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = {
        "overhead": (overhead, show_overhead),
        "two": (two, show_two),
        "uneven": (uneven, show_uneven),
    }
    parser.add_argument("parts", nargs="*", help=", ".join(parts))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="samples of before, and of this time")
    parser.add_argument("--shares", type=int, help="cpu.shares of all that is measured")
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    kept: dict[str, Samples] = {}
    if options.keep is not None and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    with tempfile.TemporaryDirectory() as folder, before_others(options.shares):
        make_inputs(Path(folder))
        for part in options.parts:
            for repeat in range(options.repeats):
                samples = kept.setdefault(part, {})
                for name, sample in trio.run(parts[part][0], Path(folder), repeat).items():
                    samples.setdefault(name, []).append(sample)
                if options.keep is not None:
                    options.keep.write_text(json.dumps(kept))
    body = "\n\n".join(show(kept[part]) for part, (_, show) in parts.items() if part in kept)
    if options.no_file:
        print(body)
    else:
        write_report("training-speed", (__doc__ or "").partition("\n")[0], body)


def make_inputs(folder: Path) -> None:
    """A model, and data: the text of the package's own sources."""
    (folder / "model.json").write_text(json.dumps(CONFIG.to_dict()))
    prepare(
        SOURCE,
        folder / "data",
        vocab_size=CONFIG.vocab_size,
        sequence_length=LENGTH,
        slice_samples=64,
    )


def write_run_file(folder: Path, rest: str, batch: int = BATCH) -> Path:
    path = folder / "run.toml"
    text = RUN_FILE.format(
        model=folder / "model.json", data=folder / "data", batch_tokens=batch * LENGTH
    )
    path.write_text(text + rest)
    return path


# What processes take


def tree_of(root: int) -> dict[int, float]:
    """CPU seconds of a process, and of each that it has started and that still runs, by pid; its own come first."""
    parents, taken = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        taken[pid] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    tree = {root: taken[root]}
    for pid in taken:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root:
            tree[pid] = taken[pid]
    return tree


@dataclass(frozen=True)
class Moment:
    """Moment at which a round was decided, and what was used and taken by then.

    Attributes:
        samples: that were used since the run began.
        cpu: CPU seconds of each process since it began; of a worker's trainer under "NAME's trainer".
    """

    at: float
    samples: int
    cpu: dict[str, float]


@dataclass
class Run:
    """A run of several processes, and what was seen of it.

    Attributes:
        joined: names of members that take part.
        began: when work was dealt first; None before.
        moments: of its rounds.
    """

    directory: Path
    processes: Processes
    joined: list[str] = field(default_factory=list)
    began: float | None = None
    moments: list[Moment] = field(default_factory=list)
    _num_bytes: int = 0

    def look(self) -> None:
        """Take in what the journal says since the last look."""
        path = self.directory / "journal"
        if not path.exists() or path.stat().st_size == self._num_bytes:
            return
        with path.open("rb") as stream:
            stream.seek(self._num_bytes)
            found = stream.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._num_bytes += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line)["entry"])

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "joined":
            self.joined.append(entry["name"])
        elif entry["kind"] == "began":
            self.began = time.monotonic()
        elif entry["kind"] == "round":
            bounds = entry["ranges"]
            samples = sum(b - a for a, b in zip(bounds[1::3], bounds[2::3], strict=True))
            cpu = {}
            for name in (LEADER, *self.processes.workers):
                cpu[name], *below = tree_of(self.processes.pid(name)).values()
                cpu[f"{name}'s trainer"] = sum(below)
            before = self.moments[-1].samples if self.moments else 0
            self.moments.append(Moment(time.monotonic(), before + samples, cpu))

    async def wait_round(self, number: int) -> None:
        """Wait until a round was decided."""
        while len(self.moments) < number:
            self.check()
            self.look()
            await trio.sleep(TICK)

    def check(self) -> None:
        """Fail where a process has ended."""
        for name in (LEADER, *self.processes.workers):
            words = self.processes.last_words(name)
            assert self.processes.is_running(name), f"{name} has ended: {words}"


@asynccontextmanager
async def open_run(
    run_file: Path,
    names: Sequence[str],
    *,
    cores: Collection[int] = (),
    within: Quotas | None = None,
) -> AsyncIterator[Run]:
    """Lead a run with workers by these names; yields when all of them take part.

    Args:
        cores: that the processes may use; none for all.
        within: quotas that the workers get as they join.
    """
    with tempfile.TemporaryDirectory(dir=run_file.parent) as directory:
        settings = ProcessSettings(run_file, Path(directory) / "run")
        settings.logs.mkdir(parents=True)
        processes = Processes(settings, names)
        run = Run(settings.directory, processes)
        allowed = os.sched_getaffinity(0)
        try:
            with trio.fail_after(DEADLINE):
                if cores:
                    os.sched_setaffinity(0, cores)  # those that are started have it, too
                processes.start(LEADER)
                while not settings.ticket.exists():
                    await trio.sleep(TICK)
                for name in names:
                    processes.start(name)
                os.sched_setaffinity(0, allowed)
                limited: set[str] = set()
                while run.began is None or limited != set(names):
                    run.check()
                    run.look()
                    for name in set(run.joined) - limited:
                        if within is not None:
                            within.limit(name, processes.pid(name))
                        limited.add(name)
                    await trio.sleep(TICK)
            yield run
            await processes.stop()
        finally:
            os.sched_setaffinity(0, allowed)
            with trio.CancelScope(shield=True):
                await processes.kill_all()


# A plain loop


def plain_loop(told: dict[str, Any]) -> None:
    """The loop that everybody writes; a line a step, with the time and the CPU seconds so far."""
    folder = Path(told["folder"])
    manifest = read_manifest(folder / "data")
    ids = [
        open_slice(slice_path(folder / "data", info), manifest, info)["input_ids"].clone()
        for info in manifest.slices
    ]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=INNER.lr, betas=INNER.betas, weight_decay=INNER.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    dealer = Dealer(manifest.sizes, seed=0)
    while True:
        parts = [ids[each.slice][each.start : each.stop] for each in dealer.deal("0", BATCH)]
        batch = torch.cat(parts).long()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), INNER.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(time.monotonic(), time.process_time(), loss.item(), flush=True)


@dataclass
class Plain:
    """A plain loop in a process of its own.

    Attributes:
        steps: when each was done, and the CPU seconds by then.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)

    def a_cpu_second(self, begin: float, end: float) -> float:
        """Samples a second of CPU, over the whole steps of a time."""
        inside = [cpu for at, cpu in self.steps if begin <= at <= end]
        return BATCH * (len(inside) - 1) / (inside[-1] - inside[0])


@asynccontextmanager
async def open_plain(folder: Path, cores: Collection[int] = ()) -> AsyncIterator[Plain]:
    """Run a plain loop; yields when it has made its first steps."""
    allowed = os.sched_getaffinity(0)
    plain = Plain()
    async with trio.open_nursery() as nursery:
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            process = await trio.lowlevel.open_process(
                [sys.executable, __file__, "--plain", json.dumps({"folder": str(folder)})],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.sched_setaffinity(0, allowed)
        nursery.start_soon(_read_steps, process, plain)
        try:
            with trio.fail_after(DEADLINE):
                while len(plain.steps) < 3:
                    await trio.sleep(TICK)
            yield plain
        finally:
            nursery.cancel_scope.cancel()
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def _read_steps(process: trio.Process, plain: Plain) -> None:
    assert process.stdout is not None
    rest = b""
    async for data in process.stdout:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            at, cpu, _ = map(float, line.split())
            plain.steps.append((at, cpu))
    raise RuntimeError(f"the plain loop has ended with status {await process.wait()}")


# Parts


async def overhead(
    folder: Path, repeat: int, *, warm: int = 2, rounds: int = 9
) -> dict[str, dict[str, float]]:
    """One member beside a plain loop: CPU seconds a batch, by process."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    first, second = cores if repeat % 2 else reversed(cores)
    async with (
        open_plain(folder, {first}) as plain,
        open_run(write_run_file(folder, ""), ["member"], cores={second}) as run,
    ):
        await run.wait_round(warm + rounds)
    begin, end = run.moments[warm - 1], run.moments[warm + rounds - 1]
    batches = (end.samples - begin.samples) / BATCH
    taken = {name: (end.cpu[name] - begin.cpu[name]) / batches for name in end.cpu}
    return {"a batch": {**taken, "plain": BATCH / plain.a_cpu_second(begin.at, end.at)}}


def show_overhead(samples: Samples) -> str:
    found = samples["a batch"]

    def row(label: str, *names: str) -> tuple[str, str, str]:
        taken = [sum(each[name] for name in names) for each in found]
        shares = [each["plain"] / seconds for each, seconds in zip(found, taken, strict=True)]
        return label, spread([1e3 * each for each in taken]).show(1), spread(shares).show(3)

    rows = [
        (*row("plain loop", "plain")[:2], ""),
        row("trainer of the member", "member's trainer"),
        row("trainer and worker", "member's trainer", "member"),
        row("trainer, worker and leader", "member's trainer", "member", LEADER),
        (*row("evaluations and checkpoints, at the leader", f"{LEADER}'s trainer")[:2], ""),
    ]
    return (
        f"One member, all defaults, batches of {BATCH} times {LENGTH} tokens: 9 rounds of 5 batches after 2 others, "
        f"with one checkpoint; {len(found)} times.\n\n"
        + table(("processes", "ms of CPU a batch", "of the plain loop's speed"), rows)
    )


async def two(
    folder: Path, repeat: int, *, warm: int = 2, rounds: int = 4
) -> dict[str, dict[str, float]]:
    """One member, then two of them, with half a core each."""
    names = ["member-0", "member-1"]
    quotas = dict.fromkeys(names, 0.5)
    return {
        str(count): await measure(
            folder, names[:count], quotas, warm=warm, rounds=rounds, batch=BATCH
        )
        for count in (1, 2)
    }


def show_two(samples: Samples) -> str:
    one, both = samples["1"], samples["2"]
    rows = []
    for label, found in (("one member", one), ("two members", both)):
        speeds, by_cpu, used = (
            spread([each[key] for each in found]).show(digits)
            for key, digits in (("a second", 2), ("a CPU second", 2), ("used", 3))
        )
        ratios = [b["a second"] / a["a second"] for a, b in zip(one, found, strict=True)]
        times = [b["a CPU second"] / a["a CPU second"] for a, b in zip(one, found, strict=True)]
        last = [spread(each).show(3) if found is both else "" for each in (ratios, times)]
        rows.append((label, speeds, by_cpu, used, *last))
    header = (
        *("members", "samples a second", "samples a CPU second", "of the quotas used"),
        *("times one's speed", "times one's, a CPU second"),
    )
    return (
        f"Members with half a core each, batches of {BATCH} times {LENGTH} tokens: 4 rounds of 5 batches after 2 "
        f"others; {len(one)} times. CPU seconds are those of workers and trainers.\n\n"
        + table(header, rows)
    )


async def uneven(folder: Path, repeat: int) -> dict[str, dict[str, float]]:
    """Four members with quotas: each alone, and all together."""
    names = [f"member-{number}" for number in range(len(QUOTAS))]
    quotas = dict(zip(names, QUOTAS, strict=True))
    found = {}
    for name in names:
        found[name] = await measure(folder, [name], quotas, warm=1, seconds=20, batch=UNEVEN_BATCH)
    for key in ("true", "false"):
        found[key] = await measure(
            folder, names, quotas, warm=4, seconds=30, batch=UNEVEN_BATCH, projected=key
        )
    return found


def show_uneven(samples: Samples) -> str:
    rows, sums = [], [0.0] * len(samples["true"])
    for (name, found), quota in zip(samples.items(), (*QUOTAS, None, None), strict=True):
        speeds = [each["a second"] for each in found]
        label = f"together, projected = {name}"
        if quota is not None:
            label = f"alone, {quota:g} of a core"
            sums = [total + each for total, each in zip(sums, speeds, strict=True)]
        used = spread([each["used"] for each in found]).show(3)
        shares = ["", ""]
        if quota is None:
            begun = [each["from the beginning"] for each in found]
            shares = [
                spread([each / total for each, total in zip(some, sums, strict=True)]).show(3)
                for some in (speeds, begun)
            ]
        rows.append((label, spread(speeds).show(2), used, *shares))
    rows.insert(len(QUOTAS), ("their sum", spread(sums).show(2), "", "", ""))
    header = (
        *("members", "samples a second", "of the quotas used"),
        *("of the sum", "with the beginning, of the sum"),
    )
    return (
        f"Uneven members by CPU quota, batches of {UNEVEN_BATCH} times {LENGTH} tokens: whole rounds over 30 s after "
        f"the first 4 (alone 20 s after the first); {len(sums)} times.\n\n" + table(header, rows)
    )


async def measure(
    folder: Path,
    members: Sequence[str],
    quotas: Mapping[str, float],
    *,
    warm: int,
    batch: int,
    rounds: int = 1,
    seconds: float = 0.0,
    projected: str = "true",
) -> dict[str, float]:
    """Measure the speed of a run of members with quotas, over whole rounds after the first ones."""
    file = write_run_file(
        folder,
        f"[eval]\nevery = 0\n[outer]\nprojected = {projected}\n[members]\nmin = {len(members)}\n",
        batch,
    )
    with quotas_of(quotas) as within:
        async with open_run(file, members, within=within) as run:
            await run.wait_round(warm + rounds)
            while run.moments[-1].at < run.moments[warm - 1].at + seconds:
                await run.wait_round(len(run.moments) + 1)
    first, last = run.moments[warm - 1], run.moments[-1]
    assert run.began is not None
    samples, took = last.samples - first.samples, last.at - first.at
    cpu = sum(
        last.cpu[each] - first.cpu[each] for name in members for each in (name, f"{name}'s trainer")
    )
    return {
        "a second": samples / took,
        "a CPU second": samples / cpu,
        "used": cpu / took / sum(quotas[name] for name in members),
        "from the beginning": last.samples / (last.at - run.began),
    }


# Groups


class Quotas:
    """CPU quotas of processes."""

    def __init__(self, quotas: Mapping[str, float]) -> None:
        self._quotas = quotas
        self._groups: list[Path] = []

    def limit(self, name: str, root: int) -> None:
        """Give a process, and those that it has started, their share of a core together."""
        group = own_group() / f"{os.getpid()}-{root}"
        group.mkdir()
        self._groups.append(group)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(int(self._quotas[name] * PERIOD)))
        for pid in tree_of(root):
            (group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Take the groups away; their processes have ended."""
        while self._groups:
            remove_group(self._groups.pop())


@contextmanager
def quotas_of(quotas: Mapping[str, float]) -> Iterator[Quotas]:
    found = Quotas(quotas)
    try:
        yield found
    finally:
        found.remove()


@contextmanager
def before_others(shares: int | None) -> Iterator[None]:
    """Have this process, and all that it starts, in a group with so many shares."""
    if shares is None:
        yield
        return
    outer = own_group()
    group = outer / f"neurogrid-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.shares").write_text(str(shares))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (outer / "cgroup.procs").write_text(str(os.getpid()))
        remove_group(group)


def own_group() -> Path:
    """The folder of the group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return CGROUPS / path.lstrip("/")
    raise RuntimeError("there are no cgroups of version 1 with CPU quotas here")


def remove_group(group: Path) -> None:
    """Take a group away, as soon as the system has noticed that its processes are gone."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    group.rmdir()


if __name__ == "__main__":
    main()
