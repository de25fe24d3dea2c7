"""A layer's weights in chunks of 1 MiB, with progress, and the acknowledgement that they are usable.

    python examples/weights.py            # receives, and prints its address
    python examples/weights.py ADDRESS    # sends 3 MiB

These are the plain weights of 1.0.0: nothing is verified or resumed. For that, see transfer.py.
"""

import sys

import trio

from neurogrid.p2p import Protocol, open_host

MIB = 1024 * 1024


async def receive() -> None:
    layers: dict[int, list[bytes | None]] = {}

    async with open_host() as host:
        protocol = Protocol(host)

        def on_chunk(layer_id, chunk_index, total_chunks, data, from_peer):
            chunks = layers.setdefault(layer_id, [None] * total_chunks)
            chunks[chunk_index] = bytes(data)
            num_there = total_chunks - chunks.count(None)
            print(f"layer {layer_id}: {num_there} of {total_chunks} chunks", flush=True)
            if num_there == total_chunks:
                # What a handler returns is awaited: it need not be async to send.
                return protocol.send_weights_ack(from_peer, layer_id)
            return None

        protocol.on_weights_received(on_chunk)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def send(address: str) -> None:
    weights = bytes(range(256)) * (3 * MIB // 256)
    async with open_host() as host:
        protocol = Protocol(host)
        peer_id = await host.connect(address)
        await protocol.send_weights(peer_id, layer_id=7, data=weights)
        await protocol.wait_for_weights_ack(peer_id, layer_id=7, timeout=60)
        print("layer 7 is usable there")


if __name__ == "__main__":
    trio.run(send, sys.argv[1]) if len(sys.argv) > 1 else trio.run(receive)
