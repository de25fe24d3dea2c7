"""Configs of strangers: data, bounded, and refused where they make no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neurogrid.p2p import PROTOCOL_V11, MessageType
from neurogrid.p2p.wire import ErrorCode, ModelConfig, serialize_config
from tests.e2e.bad_input_peer.peer import BadPeer, refused
from tests.e2e.bad_input_peer.scenarios import (
    MEMORY_LIMIT,
    VERSIONS,
    Good,
    generation_on,
    hidden,
    with_peer,
)
from tests.e2e.support import WorkerProcess

TOO_MANY_LAYERS = serialize_config(ModelConfig("m", 1, 1, 1, 1, 1, 1, 1, 1, 0.0)).replace(
    b'"num_layers":1', b'"num_layers":1e999'
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"null", "it is null"),
        (b"[]", "it is no object"),
        (b"{", "it is no JSON"),
        (b"\xff\xfe", "it is no JSON"),
        (b"{}", "is missing"),
        (TOO_MANY_LAYERS, "must be an integer from 1 to 65536"),
        (b"[" * 100_000, "it is nested deeper than 32 levels"),
    ],
    ids=lambda value: repr(value[:8]) if isinstance(value, bytes) else "",
)
def test_a_config_that_is_none(worker: WorkerProcess, data: bytes, says: str, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.CONFIG_INVALID, says):
            if version == PROTOCOL_V11:
                await peer.configure(data)
            else:
                await peer.send(MessageType.MODEL_CONFIG, data)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000; 1024 is the limit"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; 8388608 is the limit"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776; 131072 is the limit"),
        ({"hidden_size": -256}, "hidden_size"),
        ({"num_attention_heads": 0}, "is refused"),
        ({"model_type": "mamba"}, "'mamba' cannot be split"),
        ({"model_type": "no-such-type"}, "'no-such-type' is unknown to transformers"),
        ({"model_type": None}, "has no model_type"),
        ({"head_dim": "many"}, "is refused"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_makes_no_model(
    worker: WorkerProcess, good: Good, change: dict[str, Any], says: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.MODEL_UNSUPPORTED, says):
            await peer.configure(good.model.config_with(**change))

    with_peer(worker, scenario)


# Families whose tables a config may blow up, up to 4 TiB each.
@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "xglm", "max_position_embeddings": 2**24, "d_model": 2**16},
        {"model_type": "gpt_neox", "rotary_pct": 1e9},
    ],
    ids=lambda change: change["model_type"],
)
def test_a_config_whose_trial_takes_too_much(
    worker: WorkerProcess, good: Good, change: dict[str, Any]
) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.LIMIT_EXCEEDED, "its trial was given up: it takes more than"):
            await peer.configure(good.model.config_with(**change))

    with_peer(worker, scenario)


@pytest.mark.parametrize(
    "change",
    [
        {
            "hidden_size": 2**13,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "num_hidden_layers": 200,
            "intermediate_size": 2**15,
        },
        {"intermediate_size": 2**15},
    ],
    ids=["deep and wide", "wide"],
)
def test_a_config_that_takes_more_memory_than_there_is(
    worker: WorkerProcess, good: Good, change: dict[str, int]
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(good.model.config_with(**change))
        last = change.get("num_hidden_layers", 2)
        with refused(ErrorCode.OUT_OF_MEMORY, f"and this worker has {MEMORY_LIMIT:,} B"):
            await peer.assign(0, last)

    with_peer(worker, scenario)


def test_a_config_that_names_code_is_data(
    worker: WorkerProcess, good: Good, tmp_path: Path
) -> None:
    """What names code, kernels or files is dropped, so this is the good model."""

    async def scenario(peer: BadPeer) -> None:
        hostile = good.model.config_with(
            auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
            trust_remote_code=True,
            _attn_implementation="kernels-community/flash-attn2",
            attn_implementation="kernels-community/flash-attn2",
            _experts_implementation="kernels-community/moe",
            _name_or_path=str(tmp_path),
            use_kernels=True,
            quantization_config={"quant_method": "gptq", "bits": 4},
        )
        await peer.configure(hostile)
        await peer.assign(0, 2)
        for layer_id, blob in enumerate(good.model.layers):
            await peer.transfer(layer_id, blob)
        await peer.open_session(1, 0, 2)
        await peer.activate(hidden(good))

    with_peer(worker, scenario)


def test_a_peer_with_a_bad_config_keeps_nobody_away(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.CONFIG_INVALID, ""):
            await peer.configure(b"null")
        async with generation_on(good, worker.address) as outcome:
            assert outcome.tokens == [good.expected]

    with_peer(worker, scenario)


def test_a_bad_config_leaves_the_model_that_is_served(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(1, 0, 2)
        with refused(ErrorCode.CONFIG_INVALID, ""):
            await peer.configure(json.dumps({"model_name": "x"}).encode())
        await peer.activate(hidden(good))

    with_peer(worker, scenario)
