"""What does it cost that torch's threads sleep while they wait, and what does it bring beside other programs?

    python benchmarks/threads.py --rounds 3

One token is decoded after the other, in a process of its own for each figure: with threads that wait in a loop for
ever, with libgomp's own count, with those that sleep at once (what the commands set, `cli.options.threads`), and with
one thread alone. On a machine that is idle, and beside as many processes as it has cores that never rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from report import spread, table, write_report

HIDDEN_SIZES = (192, 512, 1024)
NUM_LAYERS = 8
# Tokens and seconds that one figure is taken over, whichever comes first.
NUM_TOKENS, SECONDS = 300, 2.5
VARIANTS = {
    "loop (ACTIVE)": {"OMP_WAIT_POLICY": "ACTIVE"},
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "sleep (PASSIVE, ours)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        print(*decode())
        return
    num_busy = os.cpu_count() or 1
    rates: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for busy in (0, num_busy):
            for variant in VARIANTS:
                with busy_processes(busy):
                    rates[busy, variant].append(rates_of(variant))
    header = ["beside", "threads", *(f"{size} x {NUM_LAYERS}" for size in HIDDEN_SIZES)]
    rows = []
    for (busy, variant), taken in rates.items():
        base = rates[busy, "libgomp's own"]
        cells = [
            f"{spread(rounds).show()}, x {spread([a / b for a, b in zip(rounds, bases, strict=True)]).show(2)}"
            for rounds, bases in zip(zip(*taken, strict=True), zip(*base, strict=True), strict=True)
        ]
        rows.append([f"{busy} busy processes" if busy else "nothing", variant, *cells])
    figures = "Tokens a second, and times libgomp's own in the same round: median (least to most)."
    body = f"{table(header, rows)}\n\n{figures}"
    write_report("threads", str(__doc__).partition("\n")[0], body)


def rates_of(variant: str) -> list[float]:
    """Tokens a second for each of `HIDDEN_SIZES`, of a process with this variant's environment."""
    done = subprocess.run(
        [sys.executable, __file__, "--decode"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **VARIANTS[variant]},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return [float(rate) for rate in done.stdout.split()]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that never rest, for five minutes at most."""
    loop = "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode() -> Iterator[float]:
    """Tokens a second, one at a time, of a llama of each size in float32."""
    import torch  # here: OpenMP reads its environment when torch is loaded
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    for size in HIDDEN_SIZES:
        config = LlamaConfig(
            hidden_size=size,
            num_hidden_layers=NUM_LAYERS,
            intermediate_size=4 * size,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8000,
            max_position_embeddings=512,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        token_ids = torch.randint(0, config.vocab_size, (1, 32))
        with torch.inference_mode():
            cache = model(token_ids, use_cache=True).past_key_values
            model(token_ids[:, :1], past_key_values=cache)
            started, count = time.perf_counter(), 0
            while count < NUM_TOKENS and time.perf_counter() < started + SECONDS:
                model(token_ids[:, :1], past_key_values=cache)
                count += 1
            yield count / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
