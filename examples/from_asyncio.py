"""From an asyncio program: the blocking calls in threads of asyncio, many at once.

python examples/from_asyncio.py
"""

import asyncio

from neurogrid.p2p import blocking


async def main() -> None:
    with blocking.open_host() as server, blocking.open_host() as client:
        blocking.Protocol(server).on_activation_received(lambda message: bytes(message.data)[::-1])
        protocol = blocking.Protocol(client)
        peer_id = await asyncio.to_thread(client.connect, server.addresses[0])

        def ask(text: bytes) -> bytes:
            return bytes(protocol.request_activation(peer_id, 0, 0, text, timeout=60).data)

        words = (b"many", b"at", b"once")
        answers = await asyncio.gather(*(asyncio.to_thread(ask, word) for word in words))
        print(*answers)


asyncio.run(main())
