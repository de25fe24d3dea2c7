"""How much faster than one process is a chain of stages, and what does a slow link leave of it?

    python benchmarks/pipeline_training.py speed link [--rounds 3] [--only TEXT] [--keep FILE]

`speed`: chains of two and of three stages as real processes, leader and workers with their stages' processes over
127.0.0.1, beside torch's own pipelining (GPipe and 1F1B, over gloo) and one plain process, in turns: the same weights,
batches and micro-batches of one sample, AdamW with clipping, float32, one thread each. `link`: a chain of two whose
workers have lines with a rate and a delay (network namespaces: takes root). Steps that keep state are left out. CPU
seconds are those of all processes. Where others use the machine, the steps count during which they had next to nothing.
With `--keep`, it may be measured in several sittings; `--only` takes what has a text in its name.

More than 600 lines, since a chain, torch's pipelines and the plain process are one set of processes in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import trio
from report import spread, table, write_report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from training_speed import tree_of
from transformers import LlamaConfig

from neurogrid.training.data.dealing import Dealer
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import open_slice, read_manifest, slice_path
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from neurogrid.training.stages.schedule import bubble
from neurogrid.training.testnet.network import Lines, open_network
from neurogrid.training.testnet.plan import LEADER
from neurogrid.training.testnet.processes import Processes, ProcessSettings
from neurogrid.training.trainer.models import make_model

SOURCE = Path(__file__).parents[1] / "neurogrid"
LENGTH = 256  # tokens of a sample
SEED = 7
LR, CLIP, BETAS, DECAY = 1e-3, 1.0, (0.9, 0.95), 0.1
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
RUN_FILE = """
seed = {seed}
[model]
config = "{folder}/model.json"
[data]
path = "{folder}/data"
[stop]
rounds = 10000
[eval]
every = 0
[checkpoints]
every = 1000000
[inner]
lr = {lr}
schedule = "constant"
warmup = 0
clip = {clip}
betas = [{betas[0]}, {betas[1]}]
weight_decay = {decay}
batch_tokens = {batch_tokens}
[layout]
stages = {stages}
micro_batches = {micro_batches}
activations = "{activations}"
state_every = 1000000
"""
STAGES, MICRO_BATCHES, LINK_MICRO_BATCHES = (2, 3), (4, 8), (2, 4, 8, 16)
# Steps before those that are measured; of these as many are to be quiet, unless that takes so many seconds.
WARM, LEAST, MOST_SECONDS = 2, 6, 45.0
TICK = 0.01
DEADLINE = 400.0
# A step is quiet while others have less than so much of a core; so many of them stand for all of an arm.
QUIET, FEW = 0.15, 3
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        kind: "plain"; "pair", plain ones at once that know nothing of each other; "gpipe", "1f1b", or "chain".
        activations: what a chain's travel in.
    """

    kind: str
    micro_batches: int
    stages: int = 1
    activations: str = "float32"

    @property
    def name(self) -> str:
        """Name that its figures are kept under."""
        return f"{self.kind} {self.stages} {self.activations} M={self.micro_batches}"


Sample = dict[str, Any]
"""Figures of an arm in one round.

`steps`: of each, its seconds, the CPU seconds of its processes, and how many cores others had meanwhile; `parts`: CPU
seconds of a step by kind of process; `losses` of the first steps; `load` average.
"""


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        learn(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="speed, link")
    parser.add_argument(
        "--rounds", type=int, default=3, help="an arm is done with as many times six quiet steps"
    )
    parser.add_argument("--only", default="", help="arms with this in their names, as 'M=8'")
    parser.add_argument("--delay", type=float, default=40.0, help="of a line, one way, ms")
    parser.add_argument("--mbits", type=float, default=100.0, help="rate of a worker's line")
    parser.add_argument("--keep", type=Path, help="samples of before, and of this time")
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    lines = Lines(options.delay / 1e3, options.mbits * 1e6)
    parts = {"speed": (speed_arms(), None), "link": (link_arms(), lines)}
    shows = {"speed": show_speed, "link": lambda samples: show_link(samples, lines)}
    kept: dict[str, dict[str, list[Sample]]] = {}
    if options.keep is not None and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for part in options.parts:
            arms, through = parts[part]
            for number in range(options.rounds):
                # Whatever comes first in one round comes last in the next.
                for arm in arms if number % 2 == 0 else reversed(arms):
                    samples = kept.setdefault(part, {}).setdefault(arm.name, [])
                    if options.only not in arm.name or num_quiet(samples) >= LEAST * (number + 1):
                        continue
                    sample = trio.run(measure, Path(folder), arm, through)
                    print(arm.name, said(sample), file=sys.stderr, flush=True)
                    samples.append(sample)
                    if options.keep is not None:
                        options.keep.write_text(json.dumps(kept))
    body = "\n\n".join(show(kept[part]) for part, show in shows.items() if part in kept)
    if options.no_file:
        print(body)
    else:
        write_report("pipeline-training", (__doc__ or "").partition("\n")[0], body)


def speed_arms() -> list[Arm]:
    arms = []
    for count in MICRO_BATCHES:
        arms += [Arm("plain", count), Arm("pair", count, 2)]
        for stages in STAGES:
            arms += [Arm("gpipe", count, stages), Arm("1f1b", count, stages)]
            arms += [Arm("chain", count, stages, name) for name in ("float32", "bfloat16")]
    return arms


def link_arms() -> list[Arm]:
    return [
        Arm("chain", count, 2, name)
        for count in LINK_MICRO_BATCHES
        for name in ("float32", "bfloat16")
    ]


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


# What is measured


@dataclass
class Training:
    """Processes that train.

    Attributes:
        roots: the first of each tree of processes, by a name of its kind and a number.
        num_steps: asks how many steps they have made.
        losses: asks for the loss of each.
    """

    roots: Mapping[str, int]
    num_steps: Callable[[], int]
    losses: Callable[[], list[float]]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by kind of process: of a worker its stage's apart."""
        taken: dict[str, float] = {}
        for name, pid in self.roots.items():
            own, *below = tree_of(pid).values()
            kind = name.partition(" ")[0]
            taken[kind] = taken.get(kind, 0.0) + own
            if below:
                taken[f"{kind}'s child"] = taken.get(f"{kind}'s child", 0.0) + sum(below)
        return taken


async def measure(folder: Path, arm: Arm, lines: Lines | None) -> Sample:
    """Train in one way, from the start of its processes to their end."""
    opened = open_chain(folder, arm, lines) if arm.kind == "chain" else open_torch(folder, arm)
    async with opened as training:
        with trio.fail_after(DEADLINE):
            await until(training, WARM)
            first, moments = training.num_steps(), [Moment.of(training)]
            num_quiet = 0
            while num_quiet < LEAST and moments[-1].at < moments[0].at + MOST_SECONDS:
                await until(training, first + len(moments))
                moments.append(Moment.of(training))
                num_quiet += moments[-2].cores_of_others(moments[-1]) < QUIET
        losses = training.losses()
    count = len(moments) - 1
    # Of independent processes each has made its own.
    share = arm.stages if arm.kind == "pair" else 1
    before, after = moments[0].cpu, moments[-1].cpu
    return {
        "steps": [
            [a.until(b) / share, a.taken(b) / share, a.cores_of_others(b)]
            for a, b in pairwise(moments)
        ],
        "parts": {name: (after[name] - before.get(name, 0.0)) / count / share for name in after},
        "losses": losses[: WARM + LEAST],
        "load": os.getloadavg()[0],
    }


@dataclass(frozen=True)
class Moment:
    """Moment at which a step was made, and the CPU seconds by then.

    Attributes:
        cpu: CPU seconds of its processes so far, by kind.
        others: of all that this process did not start, and what another machine took from this one.
    """

    at: float
    cpu: dict[str, float]
    others: float

    @classmethod
    def of(cls, training: Training) -> Moment:
        """The present one."""
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
        total = (user + nice + system + irq + soft + steal) / CLOCK_TICKS
        own = sum(tree_of(os.getpid()).values())
        return cls(time.monotonic(), training.cpu(), total - own)

    def until(self, later: Moment) -> float:
        return later.at - self.at

    def taken(self, later: Moment) -> float:
        return sum(later.cpu.values()) - sum(self.cpu.values())

    def cores_of_others(self, later: Moment) -> float:
        return (later.others - self.others) / self.until(later)


def quiet(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of the steps during which others had next to nothing; of all where those are few."""
    steps = [tuple(step) for each in samples for step in each["steps"]]
    found = [(took, cpu) for took, cpu, others in steps if others < QUIET]
    return found if len(found) >= FEW else [(took, cpu) for took, cpu, _ in steps]


def seconds_of(samples: Sequence[Sample]) -> list[float]:
    """Seconds of each step that counts."""
    return [took for took, _ in quiet(samples)]


def cpu_of(samples: Sequence[Sample]) -> list[float]:
    """CPU seconds of all processes, in each step that counts."""
    return [cpu for _, cpu in quiet(samples)]


def num_quiet(samples: Sequence[Sample]) -> int:
    return sum(others < QUIET for each in samples for _, _, others in each["steps"])


async def until(training: Training, number: int) -> None:
    while training.num_steps() < number:
        await trio.sleep(TICK)


def said(sample: Sample) -> str:
    """One line for whoever waits."""
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in sample["parts"].items())
    others = mean(each for _, _, each in sample["steps"])
    return (
        f"{median(seconds_of([sample])):.3f} s a step, CPU {median(cpu_of([sample])):.3f} ({parts}); "
        f"{num_quiet([sample])} of {len(sample['steps'])} steps are quiet, others have {others:.2f} cores"
    )


# A chain


@asynccontextmanager
async def open_chain(folder: Path, arm: Arm, lines: Lines | None) -> AsyncIterator[Training]:
    """Lead a run in stages, with as many workers."""
    run_file = folder / "run.toml"
    run_file.write_text(
        RUN_FILE.format(
            folder=folder,
            seed=SEED,
            lr=LR,
            clip=CLIP,
            betas=BETAS,
            decay=DECAY,
            batch_tokens=arm.micro_batches * LENGTH,
            stages=arm.stages,
            micro_batches=arm.micro_batches,
            activations=arm.activations,
        )
    )
    names = [f"worker {number}" for number in range(1, arm.stages + 1)]
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "run"
        settings = ProcessSettings(run_file, directory, lines=lines)
        settings.logs.mkdir(parents=True)
        network = None
        if lines is not None:
            opening = open_network([LEADER, *names], lines, settings.logs / "network.log")
            network = await stack.enter_async_context(opening)
        processes = Processes(settings, names, network)
        try:
            with trio.fail_after(DEADLINE):
                processes.start(LEADER)
                while not settings.ticket.exists():
                    check(processes, [LEADER])
                    await trio.sleep(TICK)
                for name in names:
                    processes.start(name)
            metrics = directory / "metrics.jsonl"

            def lines_of() -> list[bytes]:
                check(processes, [LEADER, *names])
                return metrics.read_bytes().splitlines() if metrics.exists() else []

            yield Training(
                {name: processes.pid(name) for name in (LEADER, *names)},
                lambda: len(lines_of()),
                lambda: [json.loads(line)["loss"] for line in lines_of()],
            )
            await processes.stop()
        finally:
            with trio.CancelScope(shield=True):
                await processes.kill_all()


def check(processes: Processes, names: Sequence[str]) -> None:
    """Fail where a process has ended."""
    for name in names:
        if not processes.is_running(name):
            raise RuntimeError(f"{name} has ended: {processes.last_words(name)}")


# Plain processes, and torch's pipelining


@asynccontextmanager
async def open_torch(folder: Path, arm: Arm) -> AsyncIterator[Training]:
    """Train without NeuroGrid: in one process, or in one for each stage."""
    told = {"folder": str(folder), "port": free_port(), **asdict(arm)}
    lines: list[str] = []
    processes: list[trio.Process] = []
    async with trio.open_nursery() as nursery:
        try:
            for rank in range(arm.stages):
                process = await trio.lowlevel.open_process(
                    [sys.executable, __file__, "--rank", json.dumps({**told, "rank": rank})],
                    stdout=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
                processes.append(process)
            nursery.start_soon(read_lines, processes[-1], lines)
            yield Training(
                {f"process {rank}": each.pid for rank, each in enumerate(processes)},
                lambda: len(lines),
                lambda: [float(line) for line in lines],
            )
        finally:
            nursery.cancel_scope.cancel()
            for process in processes:
                process.kill()
            with trio.CancelScope(shield=True):
                for process in processes:
                    await process.wait()


async def read_lines(process: trio.Process, lines: list[str]) -> None:
    assert process.stdout is not None
    rest = b""
    async for data in process.stdout:
        *whole, rest = (rest + data).split(b"\n")
        lines += [line.decode() for line in whole]
    raise RuntimeError(f"a process of torch has ended with status {await process.wait()}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def learn(told: Mapping[str, Any]) -> None:
    """Learn until this is killed; the last process writes a line a step, with its loss."""
    torch.set_num_threads(1)
    folder, count = Path(told["folder"]), told["micro_batches"]
    model: Any = make_model("causal-lm", json.dumps(CONFIG.to_dict()), seed=SEED, checkpoint=None)
    model.train()
    if told["kind"] in ("plain", "pair"):
        plain_loop(model, batches(folder, count), count)
        return
    rank, stages = told["rank"], told["stages"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{told['port']}", rank=rank, world_size=stages
    )
    bounds = bounds_of(model, stages)
    part = Part(model, bounds[rank], bounds[rank + 1])
    del model
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    form = ScheduleGPipe if told["kind"] == "gpipe" else Schedule1F1B
    schedule = form(stage, count, loss_fn=loss_of)
    optimizer = optimizer_of(part)
    for batch in batches(folder, count):
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch)
        elif rank < stages - 1:
            schedule.step()
        else:
            schedule.step(target=batch, losses=losses)
        squares = [each.grad.square().sum() for each in part.parameters() if each.grad is not None]
        square = torch.stack(squares).sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(part.parameters(), CLIP, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(sum(loss.item() for loss in losses) / count, flush=True)


def plain_loop(model: nn.Module, given: Iterator[Tensor], count: int) -> None:
    optimizer = optimizer_of(model)
    for batch in given:
        total = 0.0
        for piece in batch.split(1):
            loss = model(input_ids=piece, labels=piece, use_cache=False).loss / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        print(total, flush=True)


def batches(folder: Path, size: int) -> Iterator[Tensor]:
    """Yield the batches that the leader of a run deals: token ids, int64 [samples, tokens]."""
    manifest = read_manifest(folder / "data")
    ids = [
        open_slice(slice_path(folder / "data", info), manifest, info)["input_ids"].clone()
        for info in manifest.slices
    ]
    dealer = Dealer(manifest.sizes, seed=SEED)
    while True:
        ranges = dealer.deal("0", size)
        yield torch.cat([ids[each.slice][each.start : each.stop] for each in ranges]).long()


class Part(nn.Module):
    """Layers of a model, and what stands before or after them at its ends."""

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        self.layers, self.rotary = model.model.layers[start:stop], model.model.rotary_emb
        self.embed = model.model.embed_tokens if start == 0 else None
        is_last = stop == CONFIG.num_hidden_layers
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embed is None else self.embed(given)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
            )
        return hidden if self.head is None else self.head(self.norm(hidden))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)


def bounds_of(model: Any, stages: int) -> tuple[int, ...]:
    """Bounds of the stages, as the leader cuts the model."""

    def size(*modules: nn.Module) -> int:
        return sum(each.numel() * 4 for module in modules for each in module.parameters())

    sizes = StageSizes(
        tuple(map(size, model.model.layers)),
        size(model.model.embed_tokens),
        size(model.model.norm, model.lm_head),
        size(model.model.embed_tokens, model.model.norm, model.lm_head),
    )
    return cut_layers(sizes, [0] * stages)


# What is shown


def show_speed(samples: Mapping[str, list[Sample]]) -> str:
    rows = []
    for arm in speed_arms():
        found, plain = samples.get(arm.name, []), samples.get(Arm("plain", arm.micro_batches).name)
        if not found or not plain:
            continue
        apart = max(
            abs(a - b)
            for one, other in zip(plain, found, strict=False)
            for a, b in zip(one["losses"], other["losses"], strict=False)
        )
        times, taken = seconds_of(found), cpu_of(found)
        rows.append(
            (
                str(arm.micro_batches),
                label(arm),
                spread(times).show(2),
                f"{median(seconds_of(plain)) / median(times):.2f}",
                f"{min(seconds_of(plain)) / min(times):.2f}",
                spread(taken).show(2),
                f"{median(taken) / median(cpu_of(plain)):.3f}",
                f"{num_quiet(found)} of {sum(len(each['steps']) for each in found)}",
                f"{apart:.0e}" if arm.kind != "plain" else "",
            )
        )
    header = ("micro-batches", "trained by", "s a step", "times one process's speed")
    header += ("of the fastest steps", "CPU s a step", "times one process's CPU")
    header += ("quiet steps", "loss apart")
    loads = [each["load"] for some in samples.values() for each in some]
    return (
        f"Llama of {CONFIG.num_hidden_layers} layers, hidden size {CONFIG.hidden_size}; micro-batches of one sample of "
        f"{LENGTH} tokens; in up to {max(map(len, samples.values()))} rounds, of {LEAST} quiet steps each, after "
        f"{WARM} others. Quiet are steps in which other processes had less than {QUIET:g} of a core: where there are "
        f"{FEW}, they alone count. Load average {spread(loads).show(1)}.\n\n{table(header, rows)}\n\n"
        + show_parts(samples)
    )


def show_parts(samples: Mapping[str, list[Sample]]) -> str:
    """Table of the CPU time of a chain, by kind of process."""
    rows = []
    for arm in speed_arms():
        if arm.kind != "chain" or not (found := samples.get(arm.name)):
            continue
        names = (LEADER, "worker", "worker's child")
        cells = [
            spread([1e3 * each["parts"].get(name, 0.0) for each in found]).show(0) for name in names
        ]
        rows.append((str(arm.micro_batches), label(arm), *cells))
    return "CPU of a chain's processes, ms a step:\n\n" + table(
        ("micro-batches", "trained by", "leader", "workers", "stages' processes"), rows
    )


def label(arm: Arm) -> str:
    if arm.kind == "plain":
        return "one process"
    if arm.kind == "pair":
        return "two such at once, for each step of both"
    if arm.kind == "chain":
        return f"chain of {arm.stages}, {arm.activations}"
    return f"torch {arm.kind}, {arm.stages} stages"


def show_link(samples: Mapping[str, list[Sample]], lines: Lines) -> str:
    rows = []
    for arm in link_arms():
        if not (found := samples.get(arm.name)):
            continue
        times = seconds_of(found)
        computed = mean(each["parts"]["worker's child"] for each in found)
        ideal = 1 - bubble(arm.stages, arm.micro_batches)
        rows.append(
            (
                str(arm.micro_batches),
                arm.activations,
                spread(times).show(2),
                f"{arm.micro_batches / median(times):.2f}",
                f"{computed / median(times) / arm.stages:.2f}",
                f"{ideal:.2f}",
                f"{num_quiet(found)} of {sum(len(each['steps']) for each in found)}",
            )
        )
    header = ("micro-batches", "activations", "s a step", "samples a second")
    header += ("stages compute", "without a link, at most", "quiet steps")
    assert lines.rate is not None
    return (
        f"Two stages whose workers have lines of {lines.rate / 1e6:g} Mbit/s, {1e3 * lines.delay:g} ms one way, to "
        "each other and to the leader. The share of the time that stages compute is that in which their processes use "
        "a core; without a link it is the schedule's own at most, if both are as fast.\n\n"
        + table(header, rows)
    )


if __name__ == "__main__":
    main()
