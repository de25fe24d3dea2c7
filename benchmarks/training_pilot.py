"""What do runs give: held-out loss against bytes, by method; and are they what one process computes?

    python benchmarks/training_pilot.py --seeds 0 1 2 --directory pilot/

The pilot of diloco.py, by `neurogrid train`: a Llama of a million parameters learns the sources of Python's standard
library, byte by byte. A run of data parallel training warms up, and its checkpoint is the model of the others, each a
leader and workers in processes of their own. What they come to is computed once more in one process, by `one_process`.
A run that is in the directory already is not made again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import http.client
import json
import shutil
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from one_process import Samples, compute, held_out_loss
from report import table, write_report
from safetensors.torch import load_file

from tests.e2e.preloaded import TRAIN, Popen, run
from tests.ports import free_port

NUM_MEMBERS = 4
SEQUENCE_LENGTH, BATCH_TOKENS, LEARNING_RATE = 128, 512, 3e-3
NUM_HELD_OUT = 1024
SKIPPED = ("site-packages", "/test", "idlelib", "encodings")
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,  # of bytes and two more
    "hidden_size": 128,
    "intermediate_size": 341,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
RUN_FILE = """
seed = {seed}
[model]
config = "{model}"
[data]
path = "{data}"
sequence_length = {length}
[stop]
steps = {steps}
[inner]
lr = {lr}
batch_tokens = {batch_tokens}
{inner}
[members]
min = {members}
max = {members}
[checkpoints]
every = 1_000_000
[eval]
every = 1_000_000
samples = {samples}
[outer]
grace = 120.0  # nobody is late, however slow the machine is: else one process does not know what was when
{outer}
"""
WARM = "warm"


@dataclass(frozen=True)
class Way:
    """One way to train: what its run file says otherwise than by default.

    Attributes:
        outer, inner: lines of these sections.
        times: as many steps as the pilot has.
    """

    outer: str = ""
    inner: str = ""
    num_members: int = NUM_MEMBERS
    times: int = 1


WAYS = {
    "one member": Way('method = "averaging"', num_members=1),
    "data parallel": Way('method = "data_parallel"'),
    "the defaults": Way(),
    "DiLoCo": Way('method = "diloco"'),
    "averaging": Way('method = "averaging"'),
    "the defaults, lr 0.7, momentum 0.9": Way("lr = 0.7\nmomentum = 0.9"),
    "the defaults, f32": Way('codec = "f32"'),
    "the defaults, int4": Way('codec = "int4"'),
    "the defaults, topk:64": Way('codec = "topk:64"'),
    "the defaults, overlap": Way("overlap = true"),
    "DiLoCo, int4": Way('method = "diloco"\ncodec = "int4"'),
    "DiLoCo, every 50": Way('method = "diloco"\nevery = 50'),
    "the defaults, twice as long": Way(times=2),
    "one member, twice as long": Way('method = "averaging"', num_members=1, times=2),
    "data parallel, twice as long": Way('method = "data_parallel"', times=2),
}


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        loss: held-out, as the run says, in nats a token.
        simulated: the same of the model that one process comes to; None where that was left out.
        num_differing: elements of the weights that are others there.
        num_bytes: that a member sent for averaging, in the mean.
        seconds: that it took.
    """

    loss: float
    simulated: float | None
    num_differing: int | None
    num_bytes: float
    seconds: float


class Pilot:
    """The data, and runs of one seed in a directory."""

    def __init__(self, directory: Path, seed: int, num_warm: int, num_steps: int) -> None:
        directory = directory.absolute()  # processes run elsewhere
        self._directory, self._seed = directory / f"seed-{seed}", seed
        self._data = directory / "data"
        self._num_warm, self._num_steps = num_warm, num_steps
        if not self._data.exists():
            prepare(directory / "text", self._data)
        self._samples = Samples(self._data)
        self._directory.mkdir(exist_ok=True)
        model = self._directory / "model.json"
        model.write_text(json.dumps(MODEL))
        warm = Way('method = "data_parallel"', 'schedule = "constant"\nwarmup = 50')
        # Its data are others than those of the runs that follow.
        self._run(WARM, warm, model, seed, num_warm)
        self._start = self._directory / WARM / "run/checkpoints/latest"

    @property
    def start_loss(self) -> float:
        return float(figures(self._directory / WARM)["eval_loss"])

    def make(self, name: str) -> Path:
        """Make a run; where it is."""
        place = self._directory / name.replace(",", "").replace(" ", "-")
        way = WAYS[name]
        self._run(place.name, way, self._start, 1000 + self._seed, way.times * self._num_steps)
        return place

    def result(self, name: str, *, simulates: bool) -> Result:
        """Make a run, and compute it once more, unless that is to be left out."""
        way, place = WAYS[name], self.make(name)
        simulated = place / "simulated"
        # What one process does knows no rounds that overlap with training.
        if simulates and "overlap" not in way.outer and not simulated.exists():
            model = compute(place / "run", self._start, self._samples, way.num_members)
            held_out = self._samples.held_out[:NUM_HELD_OUT]
            found = held_out_loss(model, held_out), count_differing(model, place)
            simulated.write_text(json.dumps(found))
        last = figures(place)
        loss, num_differing = (
            json.loads(simulated.read_text()) if simulated.exists() else (None,) * 2
        )
        return Result(
            last["eval_loss"],
            loss,
            num_differing,
            mean(json.loads((place / "sent").read_text()).values()),
            last["seconds"],
        )

    def _run(self, name: str, way: Way, model: Path, seed: int, num_steps: int) -> None:
        place = self._directory / name
        if (place / "sent").exists():
            return
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "run.toml").write_text(
            RUN_FILE.format(
                seed=seed,
                model=model.absolute(),
                data=self._data.absolute(),
                length=SEQUENCE_LENGTH,
                steps=num_steps,
                lr=LEARNING_RATE,
                batch_tokens=BATCH_TOKENS,
                inner=way.inner,
                members=way.num_members,
                samples=NUM_HELD_OUT,
                outer=way.outer,
            )
        )
        port = free_port()
        options = [
            "--local-workers",
            str(way.num_members),
            "--wait",
            "300",
            "--http-port",
            str(port),
        ]
        with (place / "log").open("w") as log:
            process = Popen(
                [*TRAIN, "run.toml", "--dir", "run", *options, "--listen", "/ip4/127.0.0.1/tcp/0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=place,
            )
            sent: dict[str, int] = {}
            while process.poll() is None:
                for member in status(port).get("members", ()):
                    sent[member["peer_id"]] = max(
                        member["sent_bytes"], sent.get(member["peer_id"], 0)
                    )
                time.sleep(0.5)
        if process.returncode:
            raise SystemExit(f"{place}: {(place / 'log').read_text()}")
        (place / "sent").write_text(json.dumps(sent))


def prepare(text: Path, data: Path) -> None:
    """Prepare the library's sources, without what its tests and tables are."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text.mkdir(parents=True, exist_ok=True)
    for file in root.rglob("*.py"):
        if not any(name in str(file) for name in SKIPPED):
            shutil.copyfile(file, text / "-".join(file.relative_to(root).parts))
    options = ["--vocab-size", str(MODEL["vocab_size"]), "--sequence-length", str(SEQUENCE_LENGTH)]
    run([*TRAIN, "prepare", text, data, *options, "--held-out", "0.1"], check=True)


def status(port: int) -> dict[str, Any]:
    """Status that a run tells of itself; empty while it tells nothing."""
    try:
        url = f"http://127.0.0.1:{port}/v1/training/status"
        with urllib.request.urlopen(url, timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
            return told
    except (OSError, http.client.HTTPException):  # it has not begun, or ends
        return {}


def count_differing(model: torch.nn.Module, place: Path) -> int:
    """Count the elements of a model that have other bits than those that a run has ended with."""
    [file] = (place / "run/checkpoints/latest").glob("*.safetensors")
    ended = load_file(file)
    weights = dict(model.named_parameters())
    assert ended.keys() == weights.keys()
    return sum(int((ended[name] != each.detach()).sum()) for name, each in weights.items())


def figures(place: Path) -> dict[str, float]:
    """The last line of metrics.jsonl."""
    told: dict[str, float] = json.loads((place / "run/metrics.jsonl").read_text().splitlines()[-1])
    return told


HEADER = ["way", "loss", "by seed", "kept", "apart", "other bits", "MB sent a member"]


def apart_of(results: Sequence[Result]) -> str:
    """The greatest distance to what one process came to, and of how many seeds if not of all."""
    apart = [abs(each.loss - each.simulated) for each in results if each.simulated is not None]
    if not apart:
        return "-"
    told = f"{max(apart):.1e}"
    return told if len(apart) == len(results) else f"{told} ({len(apart)} of {len(results)})"


def bits_of(results: Sequence[Result]) -> str:
    """Number of elements of the weights that are others in one process, for each seed."""
    counts = [each.num_differing for each in results if each.num_differing is not None]
    return ", ".join(map(str, counts)) or "-"


def rows_of(found: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """A row for each way."""
    means = {name: mean(result.loss for result in results) for name, results in found.items()}
    alone, together = means.get("one member"), means.get("data parallel")
    rows = []
    for name, results in found.items():
        kept = "-"
        if alone is not None and together is not None:
            kept = f"{(alone - means[name]) / (alone - together):.0%}"
        rows.append(
            [
                name,
                f"{means[name]:.4f}",
                ", ".join(f"{result.loss:.4f}" for result in results),
                kept,
                apart_of(results),
                bits_of(results),
                f"{mean(result.num_bytes for result in results) / 1e6:.1f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=150, help="data parallel steps before")
    parser.add_argument("--directory", type=Path, default=Path("pilot"), help="where runs are kept")
    parser.add_argument(
        "--no-simulation", action="store_true", help="compute nothing once more in one process"
    )
    parser.add_argument("--no-file", action="store_true", help="file no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Result]] = {name: [] for name in options.ways}
    for seed in options.seeds:
        pilot = Pilot(options.directory, seed, options.warm, options.steps)
        print(f"seed {seed}, warm: {pilot.start_loss:.4f}", flush=True)
        for name, results in found.items():
            results.append(pilot.result(name, simulates=not options.no_simulation))
            print(f"seed {seed}, {name}: {results[-1]}", flush=True)
    if options.no_file:
        print(table(HEADER, rows_of(found)))
        return
    write_report(
        "training-pilot",
        f"Held-out loss (nats a token, which is a byte) after {options.steps} inner steps of a member, mean over seeds "
        f"{', '.join(map(str, options.seeds))}, from checkpoints of {options.warm} data parallel steps. Each run is "
        f"`neurogrid train` with {NUM_MEMBERS} workers, of which each takes {BATCH_TOKENS} tokens a step.\n\n"
        "*Kept* is the share of what data parallel training gains over one member. *Apart* is the greatest distance "
        "to the loss that one process comes to in plain torch, with the same samples, and what is sent rounded as f16 "
        "does; other codecs are left out there. *Other bits* is how many elements of the weights that it comes to are "
        "not those of the run, to the bit, by seed. *Sent* is what a "
        "member sent for averaging, as the run's status counts it.",
        table(HEADER, rows_of(found)),
    )


if __name__ == "__main__":
    main()
