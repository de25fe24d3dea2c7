"""What do `--quantize int8` and `int4` cost in quality, and what do they save in bytes?

    python benchmarks/quantized.py

The embedded model on the sections of its text that it was trained on, and on those held out: cross entropy in nats a
token, and the Kullback-Leibler divergence of its next tokens from those of the same checkpoint as it is, computed in
float32. Only layers are quantised. As they run, the products round activations to 8 bits; without compiled products
they do not. Ends with an error where a target is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from report import table, write_report
from torch.nn import functional
from transformers import AutoTokenizer

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.kernels import library
from neurogrid.model.kernels.compiled import VARIABLE
from neurogrid.model.stages.stage import Stage
from tools.embedded.corpus import Section, python_prose
from tools.embedded.train import Recipe, document_text, document_tokens, split_sections

MAX_TOKENS = 1024  # of a section, as in training
MAX_KL = {"int8": 1e-5, "int4": 2e-3}
MAX_BYTES = {"int8": 0.54, "int4": 0.30}  # of bfloat16


@dataclass(frozen=True)
class Form:
    """Form in which the model is held and computed.

    Attributes:
        method: of quantisation, or None.
        dtype: of activations between the products.
        has_kernels: without them activations stay as they are.
    """

    method: str | None
    dtype: str
    has_kernels: bool

    @property
    def name(self) -> str:
        """Name for a table."""
        if self.method is None:
            return "as it is"
        return self.method if self.has_kernels else f"{self.method}, activations as they are"


REFERENCE = Form(None, "float32", has_kernels=True)
FORMS = (
    REFERENCE,
    Form("int8", "float32", has_kernels=True),
    Form("int8", "float32", has_kernels=False),
    Form("int4", "float32", has_kernels=True),
    Form("int4", "float32", has_kernels=False),
    Form(None, "bfloat16", has_kernels=True),
    Form("int8", "bfloat16", has_kernels=True),
    Form("int4", "bfloat16", has_kernels=True),
)


class Model:
    """The embedded model in one form."""

    def __init__(self, form: Form) -> None:
        with kernels(form.has_kernels):
            loaded = LoadedModel.load(
                embedded_model_path(),
                name=None,
                max_seq_len=MAX_TOKENS,
                dtype=form.dtype,
                quantize=form.method,
            )
            self._ends = loaded.ends
            self._stage = Stage(
                loaded.config, dtype=loaded.dtype, device="cpu", quantization=loaded.quantization
            )
            self.num_bytes = 0
            for layer_id in range(loaded.checkpoint.num_layers):
                blob = loaded.layer_blob(layer_id)
                self.num_bytes += blob.num_bytes
                self._stage.load_layer(layer_id, parse_blob(bytearray(b"".join(blob.chunks()))))

    def log_probabilities(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary] in float64, of what follows each token."""
        stage = self._stage
        hidden_1TD = stage.forward(
            self._ends.embed(token_ids, position=0),
            start=0,
            stop=stage.num_layers,
            position=0,
            cache=stage.new_cache(),
        )
        logits_TV = self._ends.logits_rows(
            hidden_1TD.transpose(0, 1), positions=range(len(token_ids))
        )
        return functional.log_softmax(logits_TV.double(), dim=-1)


@contextmanager
def kernels(are_used: bool) -> Iterator[None]:
    """Have models that are loaded in here multiply with the compiled products, or with torch's."""
    before = os.environ.get(VARIABLE)
    try:
        if not are_used:
            os.environ[VARIABLE] = "none"
            library.cache_clear()
        yield
    finally:
        if not are_used:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before
            library.cache_clear()


@dataclass
class Quality:
    """Sums over tokens."""

    num_tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    num_equal: int = 0

    def add(self, mine_TV: torch.Tensor, its_TV: torch.Tensor, targets_T: torch.Tensor) -> None:
        """Count a section: the log probabilities of a form and of the reference."""
        self.num_tokens += len(targets_T)
        self.nats -= mine_TV.gather(1, targets_T[:, None]).sum().item()
        self.divergence += (its_TV.exp() * (its_TV - mine_TV)).sum().item()
        self.num_equal += int((mine_TV.argmax(-1) == its_TV.argmax(-1)).sum())

    @property
    def row(self) -> list[str]:
        """Cells for a table: nats a token, divergence, tokens whose likeliest next one is the same."""
        return [
            f"{self.nats / self.num_tokens:.4f}",
            f"{self.mean_divergence:.1e}",
            f"{100 * self.num_equal / self.num_tokens:.2f} %",
        ]

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.num_tokens


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    found = library()
    if found is None:
        raise SystemExit("no products were built: make kernels")
    known, held_out = split_sections(python_prose(), Recipe().validation_every)
    models = {form: Model(form) for form in FORMS}
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)
    documents = [
        [document_tokens(document_text(section), tokenizer)[: MAX_TOKENS + 1] for section in part]
        for part in (known, held_out)
    ]
    of_known, of_held_out = (qualities(models, each) for each in documents)
    plain_bytes = models[REFERENCE].num_bytes
    rows, missed = [], []
    for form, model in models.items():
        part = model.num_bytes / plain_bytes
        rows.append(
            [
                form.name,
                form.dtype,
                f"{model.num_bytes:,}",
                f"{part:.3f}",
                *of_known[form].row,
                *of_held_out[form].row,
            ]
        )
        if form.method is None or form.dtype != REFERENCE.dtype:
            continue
        if of_known[form].mean_divergence > MAX_KL[form.method]:
            missed.append(f"{form.name}: divergence beyond {MAX_KL[form.method]:g}")
        if part > MAX_BYTES[form.method]:
            missed.append(f"{form.name}: more than {MAX_BYTES[form.method]:g} of the bytes")
    targets = "; ".join(
        f"{method}: a divergence of {MAX_KL[method]:g} and {MAX_BYTES[method]:g} of the bytes at most"
        for method in MAX_KL
    )
    write_report(
        "quantized",
        "The embedded model, whose checkpoint is in bfloat16, with its layers' matrices as codes; by the compiled "
        f"products at level {found.level}, which round activations to 8 bits, and by torch's, which do not. "
        f"{_sizes(known, documents[0], 'trained on')}, {_sizes(held_out, documents[1], 'held out')}, each cut "
        f"off at {MAX_TOKENS:,} tokens. Divergence is "
        "Kullback-Leibler's from the model as it is in float32, in nats, mean over all tokens; equal are the tokens "
        "after which both have the same likeliest one. Nothing is drawn by chance: another run gives the same.",
        table(
            [
                "layers",
                "computed in",
                "bytes of all blobs",
                "x bfloat16",
                "known text: nats a token",
                "divergence",
                "equal",
                "held out: nats a token",
                "divergence",
                "equal",
            ],
            rows,
        )
        + f"\n\nTargets, in float32 on known text: {targets}. Missed: {'; '.join(missed) or 'none'}.",
    )
    if missed:
        raise SystemExit(1)


def _sizes(sections: Sequence[Section], documents: Sequence[Sequence[int]], what: str) -> str:
    return f"{len(sections)} sections {what}, {sum(len(each) - 1 for each in documents):,} tokens"


def qualities(
    models: Mapping[Form, Model], documents: Sequence[Sequence[int]]
) -> Mapping[Form, Quality]:
    """Qualities of each form over all documents."""
    found = {form: Quality() for form in models}
    for token_ids in documents:
        targets_T = torch.tensor(token_ids[1:])
        its_TV = models[REFERENCE].log_probabilities(token_ids[:-1])
        for form, quality in found.items():
            mine_TV = (
                its_TV if form == REFERENCE else models[form].log_probabilities(token_ids[:-1])
            )
            quality.add(mine_TV, its_TV, targets_T)
    return found


if __name__ == "__main__":
    main()
