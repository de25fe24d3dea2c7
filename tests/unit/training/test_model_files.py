"""A state of all stages as a checkpoint: what transformers writes of the model, which is never there as a whole."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.model.files.tensor_names import layer_of
from neurogrid.training.leading.chains import model_files
from neurogrid.training.leading.chains.model_files import write_model
from neurogrid.training.stages.weight_files import WeightFiles
from tests.unit.stage_families import MAIN_FAMILIES, OTHER_FAMILIES

FAMILIES = {**MAIN_FAMILIES, **OTHER_FAMILIES}


def write(directory: Path, config: Any, **saving: Any) -> tuple[Any, dict[str, Path]]:
    """A model in `base`, and what has become of it: the model, and its pieces."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory / "base", **saving)
    num_layers = model.config.get_text_config().num_hidden_layers
    pieces: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter)
            layer_id = layer_of(name, num_layers)
            piece = pieces.setdefault("first" if layer_id is None else f"layer.{layer_id}", {})
            piece |= {name: parameter.contiguous(), f"exp_avg/{name}": torch.ones(3)}
    files = {}
    for title, tensors in pieces.items():
        files[title] = directory / f"{title}.safetensors"
        save_file(tensors, files[title])
    return model, files


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name in sorted(some.keys() | others.keys())
        if name not in some or name not in others or not torch.equal(some[name], others[name])
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_transformers_writes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its names and bits, in files that an index tells of, and buffers that nothing learns."""
    model, files = write(tmp_path, FAMILIES[family]())
    monkeypatch.setattr(model_files, "_FILE_BYTES", 1)
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", tmp_path / "base", files)
    model.save_pretrained(tmp_path / "whole")
    assert differing(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "whole")) == []
    assert len(list((tmp_path / "out").glob("model-0000?-of-0000?.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(found) is type(model)
    assert found.dtype is torch.float32
    assert differing(found.state_dict(), model.state_dict()) == []


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        **changes,
    )


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    """As its base has it: what it ends at, and weights that became float32."""
    model, files = write(tmp_path, llama())
    model.bfloat16().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", tmp_path / "base", files)
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.generation_config.eos_token_id == [2, 7]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")


def test_it_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve layers two at most: one that is read, and one that is written."""
    model, files = write(tmp_path, llama())
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    read_ones: list[weakref.ref[Tensor]] = []
    most = 0
    read = WeightFiles.__getitem__

    def watched(self: WeightFiles, name: str) -> Tensor:
        nonlocal most
        tensor = read(self, name)
        read_ones.append(weakref.ref(tensor))
        living = [each for ref in read_ones if (each := ref()) is not None]
        most = max(most, sum(each.nbytes for each in living))
        return tensor

    monkeypatch.setattr(WeightFiles, "__getitem__", watched)
    monkeypatch.setattr(model_files, "_FILE_BYTES", layer)
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", tmp_path / "base", files)
    assert layer <= most <= 2 * layer
