"""The memory that a plan counts with, against the estimate of a scheduler that knows only a model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from neurogrid.errors import CapacityError
from neurogrid.model.files.config import build_config
from neurogrid.model.stages.cost import layer_cost
from neurogrid.planner import (
    LayerSize,
    ModelSize,
    PeerCapacity,
    Room,
    SharedLayer,
    SharedModel,
    divide,
    make_plan,
)

BYTES = 2  # an element in float16, which is what 1.0.0 computes in


@dataclass(frozen=True)
class Dimensions:
    """Of a published model, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    family: str = "llama"


MODELS = {
    "Llama-7B": Dimensions(4096, 11008, 32, 32, 32, 32000, 2048),
    "Llama-13B": Dimensions(5120, 13824, 40, 40, 40, 32000, 2048),
    "TinyLlama-1.1B": Dimensions(2048, 5632, 22, 32, 4, 32000, 2048),
    "Llama-2-70B": Dimensions(8192, 28672, 80, 64, 8, 32000, 4096),
    "Mistral-7B": Dimensions(4096, 14336, 32, 32, 8, 32000, 4096, "mistral"),
}


def go_scheduler_bytes(model: Dimensions) -> int:
    """Bytes of a layer as the scheduler of the Go implementation takes it.

    Its source is not at hand. This is what the ten fields of its ModelConfig allow: four square attention
    matrices, three of the MLP, two norms, and keys and values for the whole context, all at two bytes, and
    without regard to heads that share keys and values (so it is on the safe side for those).
    """
    attention = 4 * model.hidden * model.hidden
    mlp = 3 * model.hidden * model.intermediate
    norms = 2 * model.hidden
    cache = 2 * model.context * model.hidden
    return BYTES * (attention + mlp + norms + cache)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_takes_what_the_go_scheduler_says(name: str) -> None:
    model = MODELS[name]
    config = build_config(
        {
            "model_type": model.family,
            "hidden_size": model.hidden,
            "intermediate_size": model.intermediate,
            # Layers are alike; two are as good as eighty, and quicker built.
            "num_hidden_layers": 2,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "vocab_size": model.vocabulary,
            "max_position_embeddings": model.context,
            "sliding_window": None,
        }
    )
    costs = layer_cost(config, torch.float16)
    assert len({cost.weight_bytes for cost in costs}) == 1
    ours = costs[0].weight_bytes + costs[0].cache_bytes(model.context)
    assert ours == pytest.approx(go_scheduler_bytes(model), rel=0.3)
    # And what the dimensions say exactly, heads that share keys and values included.
    head = model.hidden // model.heads
    shared = model.kv_heads * head
    weights = (
        2 * model.hidden**2 + 2 * model.hidden * shared + 3 * model.hidden * model.intermediate
    )
    assert costs[0].weight_bytes == BYTES * (weights + 2 * model.hidden)
    assert costs[0].cache_bytes(model.context) == BYTES * 2 * shared * model.context


@pytest.mark.parametrize("is_quantised", [False, True])
def test_what_is_quantised_already_is_not_told_to_be(is_quantised: bool) -> None:
    model = ModelSize((LayerSize(100),) * 4, is_quantised=is_quantised)
    with pytest.raises(CapacityError, match="lower --max-seq-len or --max-sessions") as caught:
        make_plan(model, [PeerCapacity("one", 150), PeerCapacity("other", 150)])
    assert ("--quantize" in str(caught.value)) != is_quantised
    shared = SharedModel("m", (SharedLayer(100),) * 4, is_quantised=is_quantised)
    with pytest.raises(CapacityError, match="lower --max-seq-len") as caught:
        divide([shared], [Room("one", 150)])
    assert ("--quantize" in str(caught.value)) != is_quantised
