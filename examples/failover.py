"""Ask one peer after the other until one answers: which errors are worth another try, and which are not.

python examples/failover.py
"""

import trio

from neurogrid.errors import PeerRefusedError, RequestRefusedError, TransportError
from neurogrid.p2p import ErrorCode, Host, Protocol, TensorMessage, open_host

# What another peer, or the same one later, may do all the same.
ELSEWHERE = {ErrorCode.BUSY, ErrorCode.SHUTTING_DOWN, ErrorCode.LAYER_NOT_HELD}


async def ask_any(host: Host, protocol: Protocol, addresses: list[str], data: bytes) -> bytes:
    for address in addresses:
        try:
            peer_id = await host.connect(address)
            answer = await protocol.request_activation(peer_id, 0, 0, data, timeout=60)
        except TransportError as error:  # unreachable, lost, or no answer in time
            print(f"{type(error).__name__}; the next one")
        except PeerRefusedError as error:
            if error.code not in ELSEWHERE:
                raise
            print(f"{error.text}; the next one")
        else:
            return bytes(answer.data)
    raise TransportError(f"none of {len(addresses)} peers answered")


def refuse(message: TensorMessage) -> None:
    raise RequestRefusedError("busy with another", code=ErrorCode.BUSY, retry_after=5)


async def main() -> None:
    async with open_host() as gone:
        addresses = [gone.addresses[0]]
    async with open_host() as busy, open_host() as idle, open_host() as client:
        addresses += [busy.addresses[0], idle.addresses[0]]
        Protocol(busy).on_activation_received(refuse)
        Protocol(idle).on_activation_received(lambda message: bytes(message.data).upper())
        print(await ask_any(client, Protocol(client), addresses, b"hidden state"))


trio.run(main)
