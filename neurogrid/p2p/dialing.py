"""Which of several addresses of one peer to dial: all, each a little after the one before, until one answers.

A peer has an address for each of its interfaces, and only some can be reached from here; one that is filtered
answers nothing for as long as one waits. So the next is tried beside it, and the first connection wins. TCP goes
first: it is faster from Python than QUIC, which is dialled when no TCP address answers.

Source: RFC 8305 (Happy Eyeballs), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import trio

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.exception_groups import unwrap_errors

__all__ = ["connect_any", "dial_order"]

# Seconds. What RFC 8305 recommends: twice the round trip across a continent.
STAGGER = 0.25
# A peer has a few addresses for each interface; more are not worth the packets.
MAX_ADDRESSES = 16


def dial_order(addresses: Sequence[str]) -> list[str]:
    """The addresses, once each, those of TCP before those of QUIC, at most `MAX_ADDRESSES`."""
    unique = list(dict.fromkeys(addresses))
    return sorted(unique, key=lambda address: "/udp/" in address)[:MAX_ADDRESSES]


async def connect_any(connect: Callable[[str], Awaitable[str]], addresses: Sequence[str]) -> str:
    """Call `connect(address)` for one address after the other, `STAGGER` seconds apart or as soon as one
    fails; returns what the first that succeeds returns, and cancels the others. QUIC waits for TCP to fail.

    Raises:
        ConfigurationError: there is no address, or one is malformed.
        PeerUnreachableError: all failed; names each with its reason.
    """
    if not addresses:
        raise ConfigurationError("there is no address to dial")
    failures: dict[str, PeerUnreachableError] = {}
    results: list[str] = []

    async def attempt(address: str, ended: trio.Event, scope: trio.CancelScope) -> None:
        try:
            results.append(await connect(address))
            scope.cancel()
        except PeerUnreachableError as exc:
            failures[address] = exc
        finally:
            ended.set()

    ordered = dial_order(addresses)
    tcp = [address for address in ordered if "/udp/" not in address]
    with unwrap_errors():
        for group in (tcp, ordered[len(tcp) :]):
            async with trio.open_nursery() as nursery:
                for address in group:
                    ended = trio.Event()
                    nursery.start_soon(attempt, address, ended, nursery.cancel_scope)
                    is_last = address == group[-1]
                    with trio.move_on_after(math.inf if is_last else STAGGER):
                        await ended.wait()
            if results:
                return results[0]
    if len(failures) == 1:
        raise next(iter(failures.values()))
    raise PeerUnreachableError("; ".join(str(failure) for failure in failures.values()))
