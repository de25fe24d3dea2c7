"""What does a step cost with adapters? 8 sessions that decode together, each with an adapter of its own, against none.

    python benchmarks/adapters.py

One stage with all layers of a random Llama, one thread, CPU time of that thread. The variants take ten steps in turn,
so that a machine that drifts drifts for all; a figure is the median of the steps of a round. Not one step: rows that
decode together go on together, and the adapters of one variant are not pushed out of the caches by those of the others
while the weights stay, which are those of all. Adapters are beside all linear layers of a layer, or beside those of
queries and values. They are saved in float32, and kept in what a coordinator makes of them beside such weights; those
of rank 8 in either dtype, too. Each is read by one row: in bfloat16 8 of rank 8 have a tenth of the bytes of a bfloat16
model that is 1024 wide, and a fortieth of one of 4096.
What that changes is told as errors of what a step gives, relative to weights and adapters in float32 (root of the mean
square): of the adapters' dtype alone, of the weights' form alone, and of both.
Ends with an error where a step with 8 adapters of rank 8, PEFT's default, takes more than 1.2 of one without.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from report import Spread, spread, table, write_report
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.adapters import Adapter, LayerAdapter
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.kernels import LowRank
from neurogrid.model.stages.stage import Row, Stage

SIZES = {"512x8": (512, 8), "1024x16": (1024, 16), "2048x8": (2048, 8)}
NUM_ROWS = 8
PROMPT = 64
IN_A_ROW = 10  # steps of a variant
MOST = 1.2
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A name, a method of `--quantize`, and whether the checkpoint is saved in bfloat16.
FORMS = (
    ("float32", None, False),
    ("float32, saved in bfloat16", None, True),
    ("bfloat16", None, True),
    ("int8", "int8", True),
    ("int4", "int4", True),
)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """Adapters that the rows have.

    Attributes:
        num_adapters: different ones among the rows; 0 for none.
        targets: the linear layers that they stand beside.
        dtype: what they are kept in; None for what a coordinator makes of float32.
    """

    name: str
    num_adapters: int
    rank: int = 0
    targets: Sequence[str] = ALL
    dtype: torch.dtype | None = None


NONE = Variant("none", 0)
JUDGED = Variant("8 adapters, rank 8", 8, 8)
VARIANTS = (
    NONE,
    JUDGED,
    Variant("8 adapters, rank 8, in float32", 8, 8, dtype=torch.float32),
    Variant("8 adapters, rank 8, in bfloat16", 8, 8, dtype=torch.bfloat16),
    Variant("8 adapters, rank 16", 8, 16),
    Variant("8 adapters, rank 64", 8, 64),
    Variant("8 adapters, rank 16, queries and values", 8, 16, ("q_proj", "v_proj")),
    Variant("1 adapter, rank 16", 1, 16),
)


def save_model(size: tuple[int, int], directory: Path, *, is_half: bool) -> None:
    torch.manual_seed(0)
    hidden, layers = size
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    dtype = torch.bfloat16 if is_half else torch.float32
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)


def load(directory: Path, form: tuple[str, str | None, bool]) -> tuple[Stage, torch.dtype]:
    """A stage with all layers, and the dtype of adapters beside it that were saved in float32."""
    name, quantize, _ = form
    model = LoadedModel.load(
        directory,
        name=None,
        max_seq_len=2048,
        dtype="bfloat16" if name == "bfloat16" else "float32",
        quantize=quantize,
    )
    stage = Stage(model.config, dtype=model.dtype, device=CPU, quantization=model.quantization)
    for layer_id in range(stage.num_layers):
        blob = model.layer_blob(layer_id)
        stage.load_layer(layer_id, parse_blob(bytearray(b"".join(map(bytes, blob.chunks())))))
        stage.speed_up_layer(layer_id, fuse=model.traits.fuses)
    return stage, model.adapter_dtype or torch.float32


def make_adapter(stage: Stage, variant: Variant, dtype: torch.dtype) -> Adapter:
    layers = {
        layer_id: LayerAdapter(
            {
                path: LowRank(
                    (torch.randn(variant.rank, inputs) / inputs**0.5).to(dtype),
                    (torch.randn(outputs, variant.rank) / 64).to(dtype),
                    1.0,
                    device=CPU,
                )
                for path, (outputs, inputs) in stage.linear_layers(layer_id).items()
                if path.rpartition(".")[2] in variant.targets
            }
        )
        for layer_id in range(stage.num_layers)
    }
    adapter = Adapter(layers)
    stage.take_adapter(adapter)
    return adapter


class Sessions:
    """Sessions that decode together, in one of the variants.

    Args:
        dtype: of adapters, where the variant does not say.
    """

    def __init__(self, stage: Stage, variant: Variant, dtype: torch.dtype) -> None:
        self._stage = stage
        dtype = variant.dtype or dtype
        made = [make_adapter(stage, variant, dtype) for _ in range(variant.num_adapters)]
        self._adapters = [made[row % len(made)] if made else None for row in range(NUM_ROWS)]
        self._caches = [stage.new_cache(max_length=2048) for _ in range(NUM_ROWS)]
        self._position = PROMPT
        for adapter, cache in zip(self._adapters, self._caches, strict=True):
            stage.forward(
                torch.randn(1, PROMPT, stage.hidden_size),
                start=0,
                stop=stage.num_layers,
                position=0,
                cache=cache,
                adapter=adapter,
            )

    def step(self) -> float:
        """Seconds of the thread's CPU time for one token of each."""
        started = time.thread_time()
        self.result()
        return time.thread_time() - started

    def result(self) -> torch.Tensor:
        """What one token of each gives, [rows, hidden size]."""
        rows = [
            Row(torch.randn(1, 1, self._stage.hidden_size), self._position, cache, adapter)
            for adapter, cache in zip(self._adapters, self._caches, strict=True)
        ]
        hidden = self._stage.forward_rows(rows, start=0, stop=self._stage.num_layers)
        self._position += 1
        return torch.cat([each.reshape(1, -1).float() for each in hidden])


def errors(plain: Stage, stage: Stage, dtype: torch.dtype) -> list[str]:
    """Relative errors of what a step gives, each with adapters in float32 and in `dtype`: with plain weights, of which
    the first is the reference, and with these."""

    def result(stage: Stage, dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(1)
        return Sessions(stage, JUDGED, dtype).result()

    reference = result(plain, torch.float32)
    cases = ((plain, dtype), (stage, torch.float32), (stage, dtype))
    each = [(result(*case) - reference).norm() / reference.norm() for case in cases]
    return [f"{float(error):.1e}" for error in each]


def measure(
    stage: Stage, dtype: torch.dtype, options: argparse.Namespace
) -> dict[Variant, list[float]]:
    """Milliseconds of a step, for each round."""
    torch.manual_seed(0)
    sessions = {variant: Sessions(stage, variant, dtype) for variant in VARIANTS}
    rounds: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        seconds: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.steps // IN_A_ROW):
            for variant, its in sessions.items():
                seconds[variant] += [its.step() for _ in range(IN_A_ROW)]
        for variant, its_seconds in seconds.items():
            rounds[variant].append(1e3 * median(its_seconds))
    return rounds


def ratios(rounds: dict[Variant, list[float]], variant: Variant) -> Spread:
    """Ratios to the steps without adapters, round by round."""
    return spread([a / b for a, b in zip(rounds[variant], rounds[NONE], strict=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1024x16")
    parser.add_argument("--form", choices=[form[0] for form in FORMS], help="only this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-report", action="store_true", help="print, and file nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, off, missed = [], [], []
    for form in FORMS:
        if options.form not in (None, form[0]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_model(SIZES[options.size], Path(folder), is_half=form[2])
            stage, dtype = load(Path(folder), form)
            plain = load(Path(folder), FORMS[0])[0]
        rounds = measure(stage, dtype, options)
        off.append((form[0], str(dtype).removeprefix("torch."), *errors(plain, stage, dtype)))
        del stage, plain
        for variant in VARIANTS:
            its = ratios(rounds, variant)
            rows.append((form[0], variant.name, spread(rounds[variant]).show(2), its.show(2)))
        print(
            table(("weights", "adapters", "ms a step", "x none"), rows[-len(VARIANTS) :]),
            flush=True,
        )
        if ratios(rounds, JUDGED).middle > MOST:
            missed.append(form[0])
    body = table(("weights", "adapters", "ms a step", "x none"), rows)
    heads = (
        "weights",
        "adapters",
        "error of the adapters' dtype",
        "of the weights' form",
        "of both",
    )
    body += "\n\n" + table(heads, off)
    print(table(heads, off))
    question = (
        f"A step of {NUM_ROWS} sessions through all layers of a random Llama of {options.size} (hidden size by "
        f"layers), one thread, CPU time of the thread; medians (minimum to maximum) of {options.rounds} rounds of "
        f"{options.steps} steps, {IN_A_ROW} of each variant in turn. Without more said, adapters are beside all linear "
        "layers, and in what a coordinator keeps those in that were saved in float32: the second table has it, and how "
        "far off a step's results are, relative to weights and adapters in float32."
    )
    if not options.no_report:
        write_report(f"adapters-{options.size}", question, body)
    if missed:
        print(f"more than {MOST} x without adapters: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
