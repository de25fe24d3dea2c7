"""Does a run in stages end with the same bits when its stages are killed, and how soon does it go on?

    python benchmarks/chain_kills.py [--kills 20] [--adapter] [--stages 2] [--stage-members 1] [--seed 0]
                                      [--activations bfloat16] [--no-file]

Two runs of the same file: in one nobody is killed; in the other kill -9 hits a worker that is a stage, chosen by
chance, again and again, while one more worker stands by and the killed one is started again. All are processes over
127.0.0.1. Compared are the weights of the last checkpoint, and the loss of each step; measured is the time from a kill
to the next step of the rest. Stages of several members add up in the order that their paces give, so there no two runs
are equal: it is said how far losses are apart, and how far those of two runs are in which nobody is killed. What is
sent in bfloat16 makes of one other last bit a 256th of a number; in float32 a micro-batch that is lost or counted twice
stands out.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import spread, table, write_report
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes of the tests

from tests.e2e.training.run_processes import RUN_FILE, RunProcesses, open_run, used_samples
from tests.ports import free_port

CHAIN = """
[stop]
steps = {steps}
[layout]
stages = {stages}
stage_members = {members}
state_every = {state_every}
activations = "{activations}"
[outer]
grace = 5
[eval]
every = 0
[checkpoints]
every = 1000000
"""
ADAPTER = "[adapter]\nr = 4\n"
# Between two kills, steps; and as long for the run that it outlives them all.
MOST_STEPS_BETWEEN = 8
STEPS_OF_A_KILL = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--adapter", action="store_true", help="learn an adapter, not all weights")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--stage-members", type=int, default=1, help="members of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--activations", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    text = RUN_FILE + CHAIN.format(
        steps=options.kills * STEPS_OF_A_KILL,
        stages=options.stages,
        members=options.stage_members,
        state_every=1 if options.adapter else 10,
        activations=options.activations,
    )
    text += ADAPTER if options.adapter else ""
    num_workers = options.stages * options.stage_members
    names = [f"worker-{number}" for number in range(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        wanted, losses, _ = train(Path(folder) / "undisturbed", text, names)
        again = losses
        if options.stage_members > 1:
            _, again, _ = train(Path(folder) / "again", text, names)
        got, others, seconds = train(
            Path(folder) / "killed",
            text,
            [*names, "spare"],
            num_kills=options.kills,
            seed=options.seed,
        )
    assert wanted.keys() == got.keys()
    tensors = sum(not torch.equal(got[name], wanted[name]) for name in wanted)
    row = [
        "an adapter" if options.adapter else "all weights",
        f"{options.stages} of {options.stage_members}, {options.activations}",
        str(len(seconds)),
        spread(seconds).show(2),
        f"{tensors} of {len(wanted)}",
        f"{sum(a != b for a, b in zip(losses, others, strict=True))} of {len(losses)}",
        most_apart(losses, others),
        most_apart(losses, again),
    ]
    header = ["learned", "stages", "kills", "to the next step, s", "tensors that differ"]
    body = table([*header, "losses that differ", "at most by", "and undisturbed"], [row])
    if options.no_file:
        print(body)
    else:
        name = "chain-kills-adapter" if options.adapter else "chain-kills"
        name += "-wide" if options.stage_members > 1 else ""
        write_report(name, (__doc__ or "").partition("\n")[0], body)


def most_apart(losses: list[float], others: list[float]) -> str:
    """Greatest distance of the two losses of a step, and the step, in words."""
    apart = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return f"{max(apart):.1g} (step {apart.index(max(apart)) + 1})"


def train(
    directory: Path, text: str, names: list[str], *, num_kills: int = 0, seed: int = 0
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Lead a run to its end: what it has learned, the loss of each step, and seconds from each kill to the next."""
    directory.mkdir()
    with open_run(directory, free_port(), text) as run:
        run.lead()
        for name in names:
            run.join(name)
        seconds = kill_stages(run, num_kills, random.Random(seed))
        checkpoint = run.end()
        assert set(used_samples(run.run).values()) == {1}
        (file,) = checkpoint.glob("*model.safetensors")
        return load_file(file), [each["loss"] for each in run.figures()], seconds


def kill_stages(run: RunProcesses, num_kills: int, rng: random.Random) -> list[float]:
    """Kill stages by chance; seconds from each kill to the next step."""
    seconds: list[float] = []
    while len(seconds) < num_kills:
        run.wait_round(run.rounds() + rng.randint(1, MOST_STEPS_BETWEEN))
        time.sleep(0.1 * rng.random())
        name = rng.choice(stages_of(run))
        before = run.rounds()
        run.kill(name)
        began = time.monotonic()
        run.join(name)
        run.wait_round(before + 1)
        seconds.append(time.monotonic() - began)
    return seconds


def stages_of(run: RunProcesses) -> list[str]:
    """Names of the members that are stages, by the leader's words."""
    lines = [line for line in run.log.splitlines() if line.startswith("stages: ")]
    told = lines[-1].removeprefix("stages: ").split(", ")
    return [
        name
        for each in told
        for name in re.split(" has layers| have layers", each)[0].split(" and ")
    ]


if __name__ == "__main__":
    main()
