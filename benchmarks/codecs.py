"""How fast are the forms of a vector on the wire, one thread, and what do they lose?

    python benchmarks/codecs.py

All forms in turn, each on the same normally distributed vector, in chunks as a reduction sends them; a chunk is dropped
once it is encoded, and decoded into memory that was there. A rate is that of float32, in or out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time

import torch
from report import spread, table, write_report

from neurogrid.training.averaging.codecs import parse_codec

NAMES = ("f32", "f16", "bf16", "int8", "int4", "topk:64", "sign")
NUM_ELEMENTS = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk", type=int, default=1 << 18, help="elements of a chunk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 1e-3
    out = torch.empty(NUM_ELEMENTS)
    codecs = [parse_codec(name) for name in NAMES]
    encoded: dict[str, list[float]] = {name: [] for name in NAMES}
    decoded: dict[str, list[float]] = {name: [] for name in NAMES}
    lost = {}
    size = 4 * NUM_ELEMENTS
    for _ in range(options.rounds):
        for codec in codecs:
            begin = time.perf_counter()
            for chunk in values.split(options.chunk):
                codec.encode(chunk)
            encoded[codec.name].append(size / (time.perf_counter() - begin) / 1e9)
            chunks = [codec.encode(chunk) for chunk in values.split(options.chunk)]
            begin = time.perf_counter()
            for chunk, target in zip(chunks, out.split(options.chunk), strict=True):
                codec.decode(chunk, len(target), out=target)
            decoded[codec.name].append(size / (time.perf_counter() - begin) / 1e9)
            lost[codec.name] = float((out - values).norm() / values.norm())
    write_report(
        "codecs",
        f"Forms of a vector of {NUM_ELEMENTS:,} normally distributed float32 in chunks of {options.chunk:,} elements, "
        f"one thread; GB/s of float32, median (minimum to maximum) of {options.rounds} rounds in turn. Lost is the "
        "norm of the difference over that of the vector, in one round, without error feedback; all that `f32` does to "
        "encode is to see whether all is finite.",
        table(
            ["form", "bytes of f32's", "encode, GB/s", "decode, GB/s", "lost"],
            [
                [
                    codec.name,
                    f"{100 * codec.num_bytes(NUM_ELEMENTS) / size:.2f} %",
                    spread(encoded[codec.name]).show(2),
                    spread(decoded[codec.name]).show(2),
                    f"{lost[codec.name]:.4f}",
                ]
                for codec in codecs
            ],
        ),
    )


if __name__ == "__main__":
    main()
