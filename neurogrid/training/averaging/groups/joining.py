"""Joining a group: a peer asks at the addresses that it has, and at those in answers, until the leader has answered.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import cycle
from typing import Final

import trio

from neurogrid.errors import PeerRefusedError, RemoteProtocolError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.wire import Join, Joined, TrainingMessage

__all__ = ["join_group"]

logger = logging.getLogger(__name__)

_MAX_REDIRECTS: Final = 8
# Seconds for one answer. Who has none asks again, as the same process: a question or an answer may have been lost.
_ANSWER_TIMEOUT: Final = 5.0
# Seconds from asking one to asking the next, and how many are asked at the same time.
_APART: Final = 0.5
_MAX_ATTEMPTS: Final = 32


async def join_group(
    exchange: Exchange, addresses: Sequence[str], request: Join, failures: dict[str, str]
) -> tuple[str, Joined]:
    """Ask the peers at the addresses, and those that they name, until the leader has answered.

    Args:
        failures: is told, by address, why no group was joined there yet.

    Returns:
        The leader's peer id, and its answer.

    Raises:
        PeerRefusedError: the group refuses this peer, for good.
    """
    found: list[tuple[str, Joined]] = []
    asking: set[str] = set()
    with unwrap_errors():
        async with trio.open_nursery() as nursery:

            async def ask(address: str) -> None:
                try:
                    found.append(await _ask_to_join(exchange, [address], request))
                    nursery.cancel_scope.cancel()
                except PeerRefusedError as exc:
                    if exc.code != ErrorCode.BUSY:
                        raise
                    logger.debug("no group yet: %s: %s", address, exc)
                    failures[address] = str(exc)
                except (TransportError, RemoteProtocolError) as exc:
                    # While the members look for a leader they may name each other, or one that is gone.
                    logger.debug("no group yet: %s: %s", address, exc)
                    failures[address] = str(exc)
                finally:
                    asking.discard(address)

            # Whoever was cut off a moment ago answers after many seconds, or never: the next one is asked meanwhile.
            for address in cycle(addresses):
                if address not in asking and len(asking) < _MAX_ATTEMPTS:
                    asking.add(address)
                    nursery.start_soon(ask, address)
                await trio.sleep(_APART)
    return found[0]


async def _ask_to_join(
    exchange: Exchange, addresses: Sequence[str], request: Join
) -> tuple[str, Joined]:
    for _ in range(_MAX_REDIRECTS):
        peer_id = await exchange.host.connect_any(addresses)
        message = TensorMessage(
            TrainingMessage.JOIN, request_id=new_request_id(), data=request.encode()
        )
        answer = await exchange.request(
            peer_id, message, TrainingMessage.JOINED, timeout=_ANSWER_TIMEOUT
        )
        joined = Joined.decode(answer.data)
        if joined.decisions:
            return peer_id, joined
        addresses = joined.addresses
        if not addresses:
            break
    raise RemoteProtocolError(
        "members name each other as the leader, or one without an address",
        code=ErrorCode.PROTOCOL_VIOLATION,
    )
