"""Is DiLoCo over the network what one process computes?

    python benchmarks/diloco_network.py --names diloco_h20 diloco_h20_int4 --seeds 0

The pilot of diloco.py, once with all members in one process, once with each in a process of its own that averages with
the others in groups over TCP: one for each fragment. From the same checkpoint, on the same data: held-out losses, and
whether the weights are the same to the bit. A contribution that is lost, in the ways that lose some, weighs nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from diloco import WAYS, Losses, Pilot, Way, train
from report import table, write_report
from torch import Tensor

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.averaging.codecs import ErrorFeedback, parse_codec
from neurogrid.training.averaging.groups.blocking import BlockingGroup, open_group
from neurogrid.training.averaging.parts import Fragments
from neurogrid.training.wire import GroupSettings

TIMEOUT = 600.0


def digest(theta: Tensor) -> str:
    return hashlib.sha256(theta.numpy().tobytes()).hexdigest()[:16]


class Exchange:
    """What a member averages with the others: a group for each fragment, in the way's form, and one for all in f32."""

    def __init__(
        self, stack: ExitStack, directory: Path, pilot: Pilot, way: Way, number: int
    ) -> None:
        (own,) = pilot.members(pilot.num_members, way)[number : number + 1]
        self.own, self._number, self._way = own, number, way
        self._losses = Losses(way, pilot.num_members, pilot.seed)
        self._num_members = pilot.num_members
        turns = Fragments(own.layout, way.num_fragments)
        sizes = [
            sum(stop - start for start, stop in turns.spans(fragment))
            for fragment in range(way.num_fragments)
        ]
        identity = Identity.load(directory / f"{number}.key")
        codec = parse_codec(way.codec)

        def opened(name: str, size: int, form: str) -> BlockingGroup:
            path = directory / f"address-{name}"
            while number and not path.exists():
                time.sleep(0.05)
            settings = GroupSettings(
                min_members=pilot.num_members, grace=60.0, codec=form, result_codec="f32"
            )
            group = stack.enter_context(
                open_group(
                    {"theta": torch.empty(size)},
                    join=[path.read_text()] if number else (),
                    settings=None if number else settings,
                    identity=identity,
                    timeout=TIMEOUT,
                )
            )
            if not number:
                made = path.with_suffix(".new")
                made.write_text(group.addresses[0])
                made.rename(path)
            group.wait_members(pilot.num_members, timeout=TIMEOUT)
            return group

        self._whole = opened("whole", own.layout.num_elements, "f32")
        self._groups = [opened(str(f), size, way.codec) for f, size in enumerate(sizes)]
        self._feedback = [
            ErrorFeedback(codec, torch.zeros(size), decay=way.feedback)
            for size in sizes
            if way.feedback
        ]

    def mean(self, fragment: int, vectors: Sequence[Tensor]) -> Tensor:
        """Of a fragment, weighted; a contribution that is lost weighs nothing."""
        (vector,) = vectors
        if self._feedback:
            vector = self._feedback[fragment].due(vector)
        is_lost = self._losses.of_next_round()[self._number]
        weight = 0.0 if is_lost else self.own.weight
        found = self._average(self._groups[fragment], vector, weight)
        if self._feedback:
            self._feedback[fragment].commit()
        return found

    def mean_of_all(self, vectors: Sequence[Tensor]) -> Tensor:
        """Of whole vectors: weights, or gradients."""
        (vector,) = vectors
        return self._average(self._whole, vector, 1.0)

    def _average(self, group: BlockingGroup, vector: Tensor, weight: float) -> Tensor:
        outcome = group.average(vector, weight=weight, timeout=TIMEOUT)
        assert len(outcome.contributors) == self._num_members
        return outcome.values


def member(directory: Path, name: str, number: int) -> None:
    """Train as one of the members, and print what came of it."""
    torch.set_num_threads(1)
    saved = torch.load(directory / "pilot.pt", weights_only=False)
    pilot: Pilot = saved["pilot"]
    way = WAYS[name]
    with ExitStack() as stack:
        exchange = Exchange(stack, directory, pilot, way, number)
        if way.every is None:
            for step in range(pilot.num_steps):
                exchange.own.step(
                    pilot.num_warm + step,
                    exchange.own.draw(),
                    lambda gradient: exchange.mean_of_all([gradient]),
                )
            theta = exchange.own.theta
        else:
            theta = train(
                way,
                [exchange.own],
                exchange.mean,
                pilot.num_warm,
                pilot.num_steps,
                exchange.mean_of_all,
            )
    print(json.dumps({"loss": pilot.loss(theta), "digest": digest(theta)}))


def over_the_network(pilot: Pilot, name: str) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        torch.save({"pilot": pilot}, directory / "pilot.pt")
        # Vectors are added in the order of peer ids: in that of the members, here as there.
        keys = [directory / f"made-{number}.key" for number in range(pilot.num_members)]
        in_order = sorted(keys, key=lambda key: Identity.load(key).peer_id)
        for number, key in enumerate(in_order):
            key.rename(directory / f"{number}.key")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--member", str(number), "--directory", place]
                + ["--names", name],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(pilot.num_members)
        ]
        outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    together = [name for name in WAYS if name != "single_b4"]
    parser.add_argument("--names", nargs="+", choices=together, default=["diloco_h20"])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=150)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.member is not None:
        member(options.directory, options.names[0], options.member)
        return
    rows = []
    for seed in options.seeds:
        pilot = Pilot(options, seed)
        for name in options.names:
            members = over_the_network(pilot, name)
            simulated = pilot.run(name)
            losses = sorted({float(str(one["loss"])) for one in members})
            are_alike = len({one["digest"] for one in members}) == 1
            rows.append(
                [
                    name,
                    str(seed),
                    f"{simulated.loss:.6f}",
                    ", ".join(f"{loss:.6f}" for loss in losses),
                    f"{max(abs(loss - simulated.loss) for loss in losses):.1e}",
                    "yes" if are_alike else "no",
                ]
            )
            print(*rows[-1], flush=True)
    write_report(
        "diloco-network",
        f"Held-out loss (nats a byte) after {options.steps} steps of {options.members} members: in one process, "
        "and over the network with a process each.",
        table(["way", "seed", "one process", "network", "apart", "members alike"], rows),
    )


if __name__ == "__main__":
    main()
