"""What does the attention of a compiled layer take, against torch's scaled_dot_product_attention?

    python benchmarks/attention.py

The last tokens of a prompt over all of its keys, two heads of queries to one of keys and values, one thread. The rest
of the layer is as good as nothing: hidden states of 32, no MLP. torch has float32, ours that and codes of 8 bits.
Without a mask torch multiplies with all keys, also those that a token does not see; so it does with one, which is what
transformers gives it for a chunk of a prompt behind others. Each is called in turn, and the quickest call counts, by
the thread's time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from report import table, write_report
from torch.nn import functional

from neurogrid.model.kernels import (
    Activation,
    CompiledLayer,
    LayerParts,
    Matrix,
    Norm,
    NormPart,
    encode_states,
    library,
)

HIDDEN = 32
HEADS = 2
# Head size, tokens, keys.
SHAPES = (
    (64, 512, 1_000),
    (64, 512, 8_000),
    (64, 512, 32_000),
    (64, 4_096, 4_096),
    (64, 2_048, 16_000),
    (128, 512, 8_000),
    (80, 512, 4_000),
)


def seconds(call: Callable[[], Any]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def attention_layer(head_size: int) -> CompiledLayer:
    found = library()
    assert found is not None, "make kernels"

    def matrix(outputs: int, inputs: int) -> Matrix:
        weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
        return Matrix.of_bfloat16(found, weight, None, by_dot=False)

    norm = NormPart(torch.ones(HIDDEN), 1e-6)
    return CompiledLayer(
        found,
        LayerParts(
            projections=[matrix((HEADS + 2) * head_size, HIDDEN)],
            output=matrix(HIDDEN, HEADS * head_size),
            gate_up=(),
            down=None,
            norms={Norm.BEFORE_ATTENTION: norm, Norm.BEFORE_MLP: norm},
            num_heads=HEADS,
            num_kv_heads=1,
            head_size=head_size,
            rotary_size=0,
            scaling=head_size**-0.5,
            softcap=0.0,
            activation=Activation.SILU,
            dtype=torch.float32,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for head_size, num_tokens, num_keys in SHAPES:
        layer = attention_layer(head_size)
        hidden_RTD = torch.zeros(1, num_tokens, HIDDEN)
        queries = torch.randn(1, num_tokens, HEADS * head_size)
        keys, values = (torch.randn(1, 1, num_keys, head_size) for _ in range(2))
        coded_keys, coded_values = encode_states(keys), encode_states(values)
        queries_RHTE = queries.view(1, num_tokens, HEADS, head_size).transpose(1, 2)
        mask_TN = torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(num_keys - num_tokens)

        def ours(
            keys: torch.Tensor,
            values: torch.Tensor,
            layer: CompiledLayer = layer,
            hidden_RTD: torch.Tensor = hidden_RTD,
            queries: torch.Tensor = queries,
        ) -> None:
            layer.finish(hidden_RTD, queries, keys, values, None, first_keys=[(0, 0)])

        def theirs(
            queries_RHTE: torch.Tensor = queries_RHTE,
            keys: torch.Tensor = keys,
            values: torch.Tensor = values,
            **more: Any,
        ) -> None:
            functional.scaled_dot_product_attention(
                queries_RHTE, keys, values, enable_gqa=True, **more
            )

        calls: list[Callable[[], Any]] = [
            lambda ours=ours, k=keys, v=values: ours(k, v),
            lambda ours=ours, k=coded_keys, v=coded_values: ours(k, v),
            theirs,
            lambda theirs=theirs, mask=mask_TN: theirs(attn_mask=mask),
        ]
        if num_tokens == num_keys:
            calls.append(lambda theirs=theirs: theirs(is_causal=True))
        with torch.inference_mode():
            times = [[seconds(call) for call in calls] for _ in range(options.rounds)]
        plain, coded, whole, masked, *causal = map(min, zip(*times, strict=True))
        best = min([whole, masked, *causal])
        rows.append(
            [
                f"{head_size}",
                f"{num_tokens:,}",
                f"{num_keys:,}",
                *(f"{1000 * each:.1f} ms" for each in (plain, coded, whole, masked)),
                *([f"{1000 * causal[0]:.1f} ms"] if causal else [""]),
                f"{plain / best:.2f}",
                f"{coded / best:.2f}",
            ]
        )
        print(rows[-1], flush=True)
    header = ["head size", "tokens", "keys", "ours", "ours, int8", "torch, no mask", "torch, mask"]
    header += ["torch, causal", "ours of its best", "int8 of its best"]
    write_report("attention", (__doc__ or "").partition("\n")[0], table(header, rows))


if __name__ == "__main__":
    main()
