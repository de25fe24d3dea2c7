"""A stage's process that is given another state in the middle of a step: nothing is left of that step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as tf
import trio
from safetensors.torch import save_file

from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.stages.stage_process import PlainTensor, open_stage_process
from neurogrid.training.stages.stage_settings import StageSettings

CONFIG = tf.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)


def plain(tensor: torch.Tensor, dtype: str) -> PlainTensor:
    return PlainTensor(dtype, tuple(tensor.shape), tensor.numpy().tobytes())


def test_a_state_that_is_loaded_leaves_nothing_of_a_tied_gradient_that_was_exchanged(
    tmp_path: Path,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = saved_tensors(tf.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32))
        hidden = torch.randn(2, 8, 32)
        ids = torch.randint(0, 64, (2, 2, 8), dtype=torch.int32)
    weights = [tmp_path / "weights.safetensors"]
    save_file(tensors, weights[0])
    settings = StageSettings(json.dumps(CONFIG.to_dict()), 0, 2, InnerSection(optimizer="sgd"))

    async def main() -> None:
        async with open_stage_process(threads=1) as process:

            async def begin(step: int, pieces: dict[str, Path]) -> None:
                await process.open(
                    settings, step=step, weights=weights, pieces=pieces, activations="F32"
                )

            async def tied(tokens: torch.Tensor) -> bytes:
                await process.forward(0, 1, plain(tokens, "I32"))
                await process.backward(0, plain(hidden, "F32"))
                gradient, num_elements = await process.tied_gradient(0, 64 * 32)
                assert num_elements == 64 * 32
                return bytes(gradient.data)

            await begin(0, {})
            kept = await process.save(tmp_path / "state")
            await begin(1, kept)
            wanted = await tied(ids[1])
            # In the middle of the exchange a stage is lost, and all begin again.
            await begin(1, kept)
            assert await tied(ids[0]) != wanted
            await begin(1, kept)
            assert await tied(ids[1]) == wanted

    trio.run(main)
