"""The adapters beside a model, by name, and their parts for workers that ask."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.model.files.blob import LayerBlob, parse_blob
from tests.unit.test_server_openai import save_embedded_adapter
from tests.unit.told_coordinator import load_embedded


async def test_one_that_has_two_names_is_there_until_both_are_gone(tmp_path: Path) -> None:
    model = load_embedded()
    save_embedded_adapter(model, tmp_path / "adapter")
    adapters = ServedAdapters(model)
    for name in ("a", "b"):
        adapters.add(adapters.read(name, tmp_path / "adapter"))
    ids = [blob.blob_id() for adapter in adapters for blob in adapter.source.blobs.values()]
    assert adapters.remove("b")
    gc.collect()
    assert all([await adapters.provide("a worker", blob_id) for blob_id in ids])
    # A session has it.
    served = adapters.get("a")
    assert served is not None
    source = served.source
    assert adapters.remove("a")
    adapters.add(adapters.read("c", tmp_path / "adapter"))
    assert adapters.remove("c")
    del served
    gc.collect()
    for blob in source.blobs.values():
        assert await adapters.provide("a worker", blob.blob_id()) is blob


@pytest.mark.parametrize(
    ("method", "dtype", "kept"),
    [
        (None, torch.float32, torch.float32),
        (None, torch.float16, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
        ("int8", torch.float32, torch.bfloat16),
        ("int4", torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_have_no_more_bits_than_the_weights_beside_them(
    tmp_path: Path,
    method: str | None,
    dtype: torch.dtype,
    kept: torch.dtype,
    saved: torch.dtype,
) -> None:
    """Rounded once, where the model is; those that were saved in two bytes stay as they are."""
    model = replace(load_embedded().with_quantization(method), dtype=dtype)
    directory = tmp_path / "adapter"
    save_embedded_adapter(model, directory)
    file = directory / "adapter_model.safetensors"
    torch.manual_seed(0)
    tensors = {name: torch.randn_like(each).to(saved) for name, each in load_file(file).items()}
    save_file(tensors, file)
    source = ServedAdapters(model).read("a", directory).source
    expected = kept if saved is torch.float32 else saved
    assert _matrices(source.blobs[0]) == {
        name.removeprefix("base_model.model.model.layers.0.").removesuffix(".weight"): (
            tensor.to(expected).dtype,
            tensor.to(expected).tolist(),
        )
        for name, tensor in tensors.items()
    }


def test_a_number_that_rounding_would_make_infinite_stays(tmp_path: Path) -> None:
    model = load_embedded().with_quantization("int4")
    directory = tmp_path / "adapter"
    save_embedded_adapter(model, directory)
    file = directory / "adapter_model.safetensors"
    largest = torch.finfo(torch.float32).max
    save_file({name: each * largest for name, each in load_file(file).items()}, file)
    source = ServedAdapters(model).read("a", directory).source
    for dtype, numbers in _matrices(source.blobs[0]).values():
        assert dtype is torch.float32
        assert all(number == largest for row in numbers for number in row)


def _matrices(blob: LayerBlob) -> dict[str, tuple[torch.dtype, list[list[float]]]]:
    tensors = parse_blob(memoryview(bytearray(b"".join(bytes(each) for each in blob.chunks()))))
    return {
        name: (tensor.dtype, tensor.tolist())
        for name, tensor in tensors.items()
        if not name.endswith(".scaling")
    }
