"""A server or the client of a private Petals swarm on this machine; for `decode.py --petals-python`.

    PYTHON petals_peer.py server MODEL FIRST:STOP [MULTIADDR of a server that runs]
    PYTHON petals_peer.py client MODEL NEW_TOKENS MULTIADDR

Run by a Python that has Petals, which wants another transformers than ours: so this imports nothing of ours but a
clock. Everything listens on 127.0.0.1, with no relay and no peers but its own. A server prints its multiaddr; the
client goes on with each prompt that it reads, a list of token ids, and prints seconds to the first token and tokens a
second after it.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PETALS_IGNORE_DEPENDENCY_VERSION"] = "1"

import torch
from clock import Clock

PREFIX = "benchmark"
CACHE_TOKENS = 8192  # of all sessions


def serve(model: str, blocks: str, initial_peers: list[str]) -> None:
    from petals.server.server import Server
    from petals.utils.convert_block import QuantType

    server = Server(
        converted_model_name_or_path=model,
        dht_prefix=PREFIX,
        initial_peers=initial_peers,
        block_indices=blocks,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False,
        use_auto_relay=False,
        reachable_via_relay=False,
        skip_reachability_check=True,
        throughput=10.0,  # else it measures itself, and the network, by a public service
        device="cpu",
        torch_dtype="float32",
        quant_type=QuantType.NONE,
        attn_cache_tokens=CACHE_TOKENS,
        num_handlers=1,
    )
    (address, *_) = server.dht.get_visible_maddrs()
    print(address, flush=True)
    try:
        server.run()
    finally:
        server.shutdown()


def ask(model_path: str, num_tokens: int, address: str) -> None:
    from petals import AutoDistributedModelForCausalLM

    model = AutoDistributedModelForCausalLM.from_pretrained(
        model_path, dht_prefix=PREFIX, initial_peers=[address], torch_dtype=torch.float32
    )
    for line in sys.stdin:
        prompt = torch.tensor([json.loads(line)])
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompt, max_new_tokens=num_tokens, do_sample=False, streamer=clock
            )
        times = clock.times[1:]
        told = {
            "first": times[0] - started,
            "rate": (len(times) - 1) / (times[-1] - times[0]),
            "tokens": output[0, prompt.shape[1] :].tolist(),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "server":
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        ask(sys.argv[2], int(sys.argv[3]), sys.argv[4])
