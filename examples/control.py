"""The small messages: model config, which layers are held, how much memory there is.

python examples/control.py
"""

import trio

from neurogrid.p2p import (
    GPUInfo,
    ModelConfig,
    Protocol,
    deserialize_config,
    open_host,
    serialize_config,
)

CONFIG = ModelConfig(
    model_name="tiny",
    hidden_size=64,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=1000,
    max_seq_len=512,
    rms_norm_eps=1e-6,
)


def serve(protocol: Protocol) -> None:
    held = {1, 2}

    def on_config(config: bytes, from_peer: str) -> None:
        print(f"the config of {deserialize_config(config).model_name} came")

    def on_layer_request(layer_ids: tuple[int, ...], from_peer: str) -> list[int]:
        held.update(layer_ids)
        return sorted(held)

    protocol.on_model_config_received(on_config)
    protocol.on_layer_request_received(on_layer_request)
    protocol.on_gpu_info_request_received(lambda from_peer: GPUInfo(24 * 2**30, 2**30, "a GPU"))


async def main() -> None:
    async with open_host() as worker, open_host() as coordinator:
        serve(Protocol(worker))
        protocol = Protocol(coordinator)
        status = trio.Event()

        def on_status(layer_ids: tuple[int, ...], from_peer: str) -> None:
            print(f"now it has layers {layer_ids}")
            status.set()

        protocol.on_layer_status_received(on_status)
        peer_id = await coordinator.connect(worker.addresses[0])
        info = await protocol.request_gpu_info(peer_id, timeout=60)
        print(f"{info.name}: {(info.total_bytes - info.used_bytes) // 2**30} GiB free")
        await protocol.send_model_config(peer_id, serialize_config(CONFIG))
        print(f"it has layers {await protocol.request_layer_status(peer_id, timeout=60)}")
        await protocol.send_layer_request(peer_id, [3])
        await status.wait()


trio.run(main)
