"""Models, micro-batches and optimisers of a trainer, in the process of the test."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig, ViTConfig

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import FileRange, TrainerSettings, models
from neurogrid.training.trainer.batches import Batch
from neurogrid.training.trainer.learner import Learner
from neurogrid.training.trainer.models import make_model, save_model
from neurogrid.training.trainer.shared import make_shared, map_shared, shared_directory
from tests.unit.full_disk import full_disk

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)
SETTINGS = TrainerSettings(
    "causal-lm",
    json.dumps(CONFIG.to_dict()),
    inner=InnerSection(lr=0.1, schedule="linear", warmup=2, micro_batch=4),
    total_steps=10,
)


@pytest.fixture
def batch(tmp_path: Path) -> list[FileRange]:
    """Eight samples."""
    ids = torch.arange(64, dtype=torch.int32).reshape(8, 8) % 50
    save_file({"input_ids": ids}, tmp_path / "slice")
    return [FileRange(tmp_path / "slice", 0, 8)]


@given(st.integers(1, 100), st.integers(1, 100))
def test_micro_batches_are_few_and_even(num_samples: int, most: int) -> None:
    inputs = torch.arange(2 * num_samples).reshape(num_samples, 2)
    batch = Batch(inputs, inputs, inputs.numel(), "")
    pieces = [piece for piece, _ in batch.pieces(most)]
    sizes = [len(piece) for piece in pieces]
    assert torch.equal(torch.cat(pieces), inputs)
    assert len(sizes) == math.ceil(num_samples / most)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("kind", "config", "error", "words"),
    [
        ("causal-lm", "{", ConfigurationError, "not valid JSON"),
        ("causal-lm", "[]", ConfigurationError, "not a JSON object"),
        ("causal-lm", '{"model_type": "resnet"}', UnsupportedModelError, "no causal language"),
        ("causal-lm", '{"model_type": "mine"}', UnsupportedModelError, "unknown to transformers"),
        ("image-classification", '{"model_type": "llama"}', UnsupportedModelError, "classifier"),
        ("image-classification", "{}", UnsupportedModelError, "no model_type"),
        (
            "image-classification",
            '{"model_type": "vit", "num_labels": 10000000}',
            UnsupportedModelError,
            "num_labels must be",
        ),
    ],
)
def test_models_that_there_cannot_be(
    kind: str, config: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_model(kind, config, seed=0, checkpoint=None)


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=tmp_path / "nowhere")
    model = make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=None)
    model.save_pretrained(tmp_path)
    again = make_model("causal-lm", SETTINGS.config, seed=1, checkpoint=tmp_path)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    config = CONFIG.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((UnsupportedModelError, CheckpointError)):
        make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(SETTINGS.config)
    with pytest.raises(CheckpointError, match=r"has no model\.norm\.weight \(1 tensors"):
        make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=tmp_path)


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]),
        GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, architectures=["GPT2LMHeadModel"]
        ),
        Qwen3MoeConfig(**TINY, **EXPERTS, architectures=["Qwen3MoeForCausalLM"]),
    ],
    ids=lambda config: str(config.model_type),
)
def test_random_weights_may_lie_in_files(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits; nothing that is large is memory of the process, and nothing is left but what was saved."""
    monkeypatch.setattr(models, "_LARGE", 1024)
    text = json.dumps(config.to_dict())
    expected: Any = make_model("causal-lm", text, seed=3, checkpoint=None)
    made: Any = make_model("causal-lm", text, seed=3, checkpoint=None, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    for (name, one), other in zip(made.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad
        assert (one.untyped_storage().filename is not None) == (one.nbytes >= 1024), name
    save_model(made, tmp_path, file_bytes=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = make_model("causal-lm", text, seed=4, checkpoint=tmp_path)
    assert all(map(torch.equal, again.parameters(), expected.parameters()))


def test_files_that_there_is_no_room_for_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path, num_elements: int) -> None:
        with full_disk():
            make_shared(path, num_elements)

    monkeypatch.setattr(models, "_LARGE", 1)
    monkeypatch.setattr(models, "make_shared", make)
    with pytest.raises(ConfigurationError, match=r"has no room for \d+ bytes of weights"):
        make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=None, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_there_is_no_room_for_is_an_error_of_the_disk(tmp_path: Path) -> None:
    model = make_model("causal-lm", SETTINGS.config, seed=0, checkpoint=None)
    with full_disk(), pytest.raises(OSError, match=r"File too large|I/O error"):
        save_model(model, tmp_path)


def test_classes_are_those_of_the_config() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = ViTConfig(intermediate_size=8, image_size=16, patch_size=8, num_labels=7, **sizes)
    text = json.dumps(config.to_dict())
    model: Any = make_model("image-classification", text, seed=0, checkpoint=None)
    assert model.config.num_labels == model.classifier.out_features == 7


def test_what_is_kept_for_later_makes_room_for_a_batch(
    batch: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was freed counts for the limit as long as it is kept; the error is what safetensors says."""
    learner = Learner(SETTINGS, None)
    read = learner.reader.read
    is_full, text = (
        [True],
        "unable to mmap 16464 bytes from file <slice>: Cannot allocate memory (12)",
    )

    def read_full(ranges: list[FileRange]) -> Batch:
        if is_full[0]:
            raise RuntimeError(text)
        return read(ranges)

    monkeypatch.setattr(learner.reader, "read", read_full)
    with pytest.raises(RuntimeError, match="Cannot allocate"):
        learner.read(batch)
    monkeypatch.setattr(learner.memory, "let_go", lambda: is_full.__setitem__(0, False))
    assert torch.equal(learner.read(batch).inputs, read(batch).inputs)
    is_full[0], text = True, "what is no matter of memory"
    with pytest.raises(RuntimeError, match="no matter"):
        learner.read(batch)


def test_rates_are_those_of_the_steps_numbers(batch: list[FileRange]) -> None:
    """Whatever was computed before; beyond the run that of its last step."""
    learner = Learner(SETTINGS, None)
    read = learner.reader.read(batch)
    rates = []
    for number in (0, 1, 2, 6, 9, 10, 500, 2):
        learner.step(read, number=number, seed=0)
        rates.append(learner._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0, 0.05, 0.1, 0.05, 0.0125, 0, 0, 0.1])


def test_memory_that_is_too_small_for_one_sample(batch: list[FileRange]) -> None:
    inner = replace(SETTINGS.inner, micro_batch=0)
    learner = Learner(replace(SETTINGS, inner=inner, memory_limit=1024**2), None)
    with pytest.raises(ConfigurationError) as told:
        learner.step(learner.reader.read(batch), number=0, seed=0)
    said = re.match(
        r"not even one sample at once fits into 1,048,576 bytes of memory: with ([0-9,]+) parameters it takes about "
        r"([0-9,]+)\. Give the member more \(--memory-limit\)",
        str(told.value),
    )
    assert said is not None, told.value
    num_parameters, needed = (int(each.replace(",", "")) for each in said.groups())
    assert num_parameters == learner.layout.num_elements
    assert needed > learner.memory.used()


def test_a_step_that_runs_out_of_memory_is_made_of_smaller_ones(
    batch: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, plain = Learner(SETTINGS, None), Learner(replace(SETTINGS, seed=0), None)
    forward = learner._forward

    def narrow(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(inputs) > 2:
            torch.empty(2**60)
        return forward(inputs, labels)

    monkeypatch.setattr(learner, "_forward", narrow)
    step = learner.step(learner.reader.read(batch), number=1, seed=0)
    expected = plain.step(plain.reader.read(batch), number=1, seed=0)
    assert learner.micro_batch == 2
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.norm == pytest.approx(expected.norm, rel=1e-4)


def test_gradients_have_nothing_of_a_batch_that_did_not_fit(
    batch: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computes that of another member again has no memory for it, and goes on with its own work."""
    inner = replace(SETTINGS.inner, micro_batch=1)
    learner, plain = (Learner(replace(SETTINGS, inner=inner), None) for _ in range(2))
    read, forward, num_passes = learner.reader.read(batch), learner._forward, 0

    def narrow(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 3:
            torch.empty(2**60)
        return forward(inputs, labels)

    monkeypatch.setattr(learner, "_forward", narrow)
    with pytest.raises(ConfigurationError, match="not even one sample"):
        learner.compute_gradients(read, number=1, seed=0)
    own, expected = (torch.empty(learner.layout.num_elements) for _ in range(2))
    for each, vector in ((learner, own), (plain, expected)):
        each.compute_gradients(read, number=1, seed=0)
        each.take_gradients(vector)
    assert torch.equal(own, expected)


def test_optimisers_of_others_are_refused_and_change_nothing(
    batch: list[FileRange], tmp_path: Path
) -> None:
    learner = Learner(SETTINGS, None)
    learner.step(learner.reader.read(batch), number=1, seed=0)
    file = tmp_path / "optimizer"
    learner.save_optimizer(file)
    # What is loaded is the file itself, which is written to below.
    whole = {key: each.clone() for key, each in load_file(file).items()}
    told = {"format": "neurogrid inner optimizer 1", "optimizer": "adamw", "micro_batch": "4"}
    name = "model.norm.weight"

    def refused(
        words: str, metadata: dict[str, str] = told, **changes: torch.Tensor | None
    ) -> None:
        tensors = {key: each for key, each in (whole | changes).items() if each is not None}
        save_file(tensors, tmp_path / "other", metadata)
        with pytest.raises(CheckpointError, match=words):
            learner.load_optimizer(tmp_path / "other")

    refused("is no inner optimiser", {})
    refused("is of 'sgd', and the run has 'adamw'", told | {"optimizer": "sgd"})
    refused("micro-batches is '-3'", told | {"micro_batch": "-3"})
    refused("micro-batches is '99999999999999'", told | {"micro_batch": "9" * 14})
    refused(f"lacks what belongs to {name}", **{f"state/exp_avg/{name}": None})
    refused("belongs to another", **{"state/exp_avg/other.weight": torch.zeros(2)})
    refused("belongs to another", **{f"state/other/{name}": torch.zeros(16)})
    refused("belongs to another", other=torch.zeros(16))
    refused(r"is torch.float32 \[3\], and", **{f"state/exp_avg/{name}": torch.zeros(3)})
    refused("is torch.float16", **{f"state/exp_avg/{name}": torch.zeros(16).half()})
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load_optimizer(file)
    learner.save_optimizer(file)
    again = load_file(file)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole)


def test_a_vector_that_is_shared(tmp_path: Path) -> None:
    with shared_directory() as folder:
        make_shared(folder / "vector", 3)
        one, other = (map_shared(folder / "vector", 3) for _ in range(2))
        one.copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert other.tolist() == [1, 2, 3]
    assert not folder.exists()
    with full_disk(), pytest.raises(ConfigurationError, match="no room for 4000 bytes of weights"):
        make_shared(tmp_path / "vector", 1000)
    assert not (tmp_path / "vector").exists()
