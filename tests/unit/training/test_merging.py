"""Adapters that are merged into their models: what peft itself makes of both, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from neurogrid.errors import CheckpointError, ConfigurationError, NeuroGridError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.checkpoint_files import judge_checkpoint
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.training.checkpoints import export
from tests.unit.stage_families import MAIN_FAMILIES, OTHER_FAMILIES

peft = pytest.importorskip("peft")

FAMILIES = {**MAIN_FAMILIES, **OTHER_FAMILIES}


def write(directory: Path, family: str = "llama", **saving: Any) -> Any:
    """A model in `base`, and an adapter by PEFT for all linear layers of its layers in `adapter`; PEFT's model."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    model.save_pretrained(directory / "base", **saving)
    num_layers = model.config.get_text_config().num_hidden_layers
    config = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=[
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and layer_of(f"{name}.", num_layers) is not None
        ],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(directory / "base")
    adapted.save_pretrained(directory / "adapter")
    return adapted


def change_config(adapter: Path, **values: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(adapter: Path, changed: dict[str, torch.Tensor | None]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file) | changed
    save_file({name: each for name, each in tensors.items() if each is not None}, file)


@pytest.mark.parametrize(
    "family", ["llama-tied", "qwen3", "mixtral", "llama4", "gpt-neox", "opt", "jamba"]
)
def test_what_is_merged_is_what_peft_merges(family: str, tmp_path: Path) -> None:
    """With the same bits."""
    adapted = write(tmp_path, family)
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert export(tmp_path / "adapter", tmp_path / "out") == tmp_path / "adapter"
    expected = adapted.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == before.keys()
    assert any(not torch.equal(exported[name], before[name]) for name in before)
    assert Checkpoint.open(tmp_path / "out").present_layers == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_is_made_in_float32(dtype: str, tmp_path: Path) -> None:
    """Of weights in bfloat16, in several files; and it is rounded once."""
    adapted = write(tmp_path)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    shutil.rmtree(tmp_path / "base")
    narrow.save_pretrained(tmp_path / "base", max_shard_size=20_000)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 3
    export(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    with torch.no_grad():
        for name, value in adapted.get_base_model().named_parameters():
            if "lora_" not in name:
                value.copy_(value.to(torch.bfloat16))
    expected = adapted.merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == getattr(torch, dtype)
    assert index["metadata"]["total_size"] == sum(
        each.nbytes for each in found.state_dict().values()
    )
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value.to(found.dtype)), name


def test_the_tokenizer_of_the_adapter_comes_first(tmp_path: Path) -> None:
    """A run may have one of its own; files of two are not mixed."""
    write(tmp_path)
    for name in ("tokenizer.json", "merges.txt"):
        (tmp_path / "base" / name).write_text(f'"{name} of the base"')
    (tmp_path / "base" / "notes.md").write_text("")
    export(tmp_path / "adapter", tmp_path / "one")
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "one").iterdir()} == {
        *names,
        "tokenizer.json",
        "merges.txt",
    }
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    export(tmp_path / "adapter", tmp_path / "two")
    assert {file.name for file in (tmp_path / "two").iterdir()} == {*names, "tokenizer.json"}
    assert (tmp_path / "two" / "tokenizer.json").read_text() == "{}"


def test_the_model_is_where_the_adapter_or_the_user_says(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"no such directory here: say with --base where"):
        export(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"--base .*/none: there is no such directory"):
        export(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "none")
    export(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "elsewhere")
    change_config(tmp_path / "adapter", base_model_name_or_path=None)
    with pytest.raises(ConfigurationError, match="does not say which model it is for"):
        export(tmp_path / "adapter", tmp_path / "again")
    with pytest.raises(ConfigurationError, match=r"--base is for an adapter, and .* whole model"):
        export(tmp_path / "out", tmp_path / "again", base=tmp_path / "elsewhere")


def test_an_adapter_alone_is_not_served(tmp_path: Path) -> None:
    write(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"neurogrid train export .*/adapter OUT$"):
            judge_checkpoint(tmp_path / "adapter")
        shutil.copy(tmp_path / "base" / "config.json", tmp_path / "adapter")


LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({f"{LAYER}.lora_B.weight": None}, f"the adapter lacks {LAYER}.lora_B.weight"),
        ({f"{LAYER}.lora_B.weight": torch.ones(48, 4)}, "which are not of rank 3"),
        ({f"{LAYER}.lora_B.weight": torch.ones(3)}, "which are not of rank 3"),
        (
            {f"{LAYER}.lora_B.weight": torch.ones(47, 3)},
            r"has shape \[48, 48\], and the adapter is for \[47, 48\]: it belongs to another model",
        ),
        (
            {
                f"{LAYER}s.lora_{part}.weight": torch.ones(shape)
                for part, shape in {"A": (3, 48), "B": (48, 3)}.items()
            },
            r"has no linear layer model.layers.1.self_attn.q_projs, which the adapter is for",
        ),
        (
            {
                f"base_model.model.lm_head.lora_{part}.weight": torch.ones(shape)
                for part, shape in {"A": (3, 48), "B": (96, 3)}.items()
            },
            "the adapter is for lm_head, which is in no layer",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    changed: dict[str, torch.Tensor | None], told: str, tmp_path: Path
) -> None:
    write(tmp_path)
    change_tensors(tmp_path / "adapter", changed)
    with pytest.raises(NeuroGridError, match=told):
        export(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_whose_files_have_other_names_is_refused(tmp_path: Path) -> None:
    """As some at the hub, without the prefix that transformers has: what has no place is not left out."""
    write(tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    tensors = {name.removeprefix("model."): each for name, each in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no model.layers.0.mlp.down_proj.weight, which"):
        export(tmp_path / "adapter", tmp_path / "out")


def test_nothing_is_merged_into_codes(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "base" / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    with pytest.raises(NeuroGridError, match="no adapter is merged into codes: name the float16"):
        export(tmp_path / "adapter", tmp_path / "out")
