"""Is DiLoCo over the network what one process computes?

    python benchmarks/diloco_network.py --names diloco_h20 diloco_h20_int4 --seeds 0

The pilot of diloco.py, once with all members in one process, once with each in a process of its own that averages with
the others in a group over TCP. From the same checkpoint, on the same data: held-out losses, and whether the weights are
the same to the bit.
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
from pathlib import Path

import torch
from diloco import WAYS, Pilot, train
from report import table, write_report
from torch import Tensor

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.averaging.groups.blocking import open_group
from neurogrid.training.wire import GroupSettings

TIMEOUT = 600.0


def digest(theta: Tensor) -> str:
    return hashlib.sha256(theta.numpy().tobytes()).hexdigest()[:16]


def member(directory: Path, name: str, number: int) -> None:
    """Train as one of the members, and print what came of it."""
    torch.set_num_threads(1)
    saved = torch.load(directory / "pilot.pt", weights_only=False)
    pilot: Pilot = saved["pilot"]
    way = WAYS[name]
    own = pilot.members(pilot.num_members)[number]
    if number == 0:
        join: Sequence[str] = ()
    else:
        while not (directory / "address").exists():
            time.sleep(0.05)
        join = [(directory / "address").read_text()]
    settings = GroupSettings(
        min_members=pilot.num_members, grace=60.0, codec=way.codec, result_codec="f32"
    )
    with open_group(
        {"theta": own.theta},
        join=join,
        settings=None if join else settings,
        identity=Identity.load(directory / f"{number}.key"),
        timeout=TIMEOUT,
    ) as group:
        if number == 0:
            (directory / "address.new").write_text(group.addresses[0])
            (directory / "address.new").rename(directory / "address")
        group.wait_members(pilot.num_members, timeout=TIMEOUT)

        def mean(fragment: int, vectors: Sequence[Tensor]) -> Tensor:
            (vector,) = vectors
            outcome = group.average(vector, timeout=TIMEOUT)
            assert len(outcome.contributors) == pilot.num_members
            return outcome.values

        theta = train(way, [own], mean, pilot.num_warm, pilot.num_steps)
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
    parser.add_argument("--names", nargs="+", choices=WAYS, default=["diloco_h20"])
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
