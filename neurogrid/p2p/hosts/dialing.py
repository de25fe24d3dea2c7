"""Dialling of one peer at several addresses: all, each a little after the one before, until one answers.

A peer has an address for each of its interfaces, and only some can be reached from here; one that is filtered
answers nothing for as long as one waits. So the next is tried beside it, and the first connection wins. TCP goes
first: it is faster from Python than QUIC, which is dialled when no TCP address answers. A relay is somebody else's
line: it is tried last.

Source: RFC 8305 (Happy Eyeballs), section 5.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.exception_groups import unwrap_errors

__all__ = ["connect_any", "dial_order"]

# Seconds. What RFC 8305 recommends: twice the round trip across a continent.
STAGGER = 0.25
# Seconds that direct addresses have to themselves before one through a relay is tried as well. A connection over it is
# made direct afterwards, where that can be.
RELAYED_AFTER = 1.0
# A peer has a few addresses for each interface; more are not worth the packets.
MAX_ADDRESSES = 16


def dial_order(addresses: Sequence[str]) -> list[str]:
    """The addresses, once each, those of TCP before those of QUIC before those through relays, at most
    `MAX_ADDRESSES`."""
    unique = list(dict.fromkeys(addresses))
    return sorted(unique, key=_rank)[:MAX_ADDRESSES]


def _rank(address: str) -> int:
    if "/p2p-circuit" in address:
        return 2
    return 1 if "/udp/" in address else 0


async def connect_any(connect: Callable[[str], Awaitable[str]], addresses: Sequence[str]) -> str:
    """Call `connect(address)` for one address after the other, `STAGGER` seconds apart or as soon as one
    fails; returns what the first that succeeds returns, and cancels the others. QUIC waits for TCP to fail, and
    relays for both to fail, or `RELAYED_AFTER`.

    Raises:
        ConfigurationError: there is no address, or one is malformed.
        PeerUnreachableError: all failed; names each with its reason.
    """
    if not addresses:
        raise ConfigurationError("there is no address to dial")
    failures: dict[str, PeerUnreachableError] = {}
    results: list[str] = []

    async def attempt(address: str, ended: trio.Event) -> None:
        try:
            results.append(await connect(address))
            nursery.cancel_scope.cancel()
        except PeerUnreachableError as exc:
            failures[address] = exc
        finally:
            ended.set()

    async def attempt_all(group: Sequence[str]) -> None:
        async with trio.open_nursery() as attempts:
            for address in group:
                ended = trio.Event()
                attempts.start_soon(attempt, address, ended)
                with trio.move_on_after(STAGGER):
                    await ended.wait()

    async def attempt_direct() -> None:
        await attempt_all(tcp)
        await attempt_all(quic)
        direct_over.set()

    ordered = dial_order(addresses)
    tcp, quic, relayed = ([a for a in ordered if _rank(a) == rank] for rank in range(3))
    direct_over = trio.Event()
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt_direct)
            with trio.move_on_after(RELAYED_AFTER if relayed else 0.0):
                await direct_over.wait()
            await attempt_all(relayed)
    if results:
        return results[0]
    if len(failures) == 1:
        raise next(iter(failures.values()))
    raise PeerUnreachableError("; ".join(str(failure) for failure in failures.values()))
