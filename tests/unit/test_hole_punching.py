"""When a direct connection is tried for again. How one comes about needs NATs: tests/e2e/test_nat_upgrade.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p import Identity
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.hole_punching import HolePuncher, Path

PEER = Identity.generate().peer_id


class RelayedHost:
    """A host that is connected to one peer, through a relay, which gives it no stream for now."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.start_soon = nursery.start_soon
        self.is_there = True
        self.num_asked = 0
        self.swarm = SimpleNamespace(
            protect=lambda *given: None,
            unprotect=lambda *given: None,
            get_connections=lambda peer_id: [],
        )

    def set_stream_handler(self, protocol_id: str, handler: object) -> None: ...

    def on_disconnected(self, handler: Callable[[str], None]) -> None:
        self.lose = handler

    def is_connected(self, peer_id: str) -> bool:
        return self.is_there

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Any:
        self.num_asked += 1
        await trio.sleep(10)
        raise PeerUnreachableError(f"{peer_id} does not answer a new stream")


async def test_a_peer_that_had_no_time_for_a_stream_is_asked_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        host = RelayedHost(nursery)
        puncher = HolePuncher(
            cast(Libp2pHost, host), own_addresses=list, last_used=lambda peer_id: 0.0
        )
        puncher.upgrade(PEER)
        await trio.sleep(3600)
        assert 5 <= host.num_asked <= 14  # after pauses that grow
        (path,) = puncher.paths()
        assert path.path is Path.RELAYED
        assert "does not answer" in path.reason
        host.is_there = False
        host.lose(PEER)
        before = host.num_asked
        await trio.sleep(3600)
        assert host.num_asked <= before + 1
        assert not puncher.paths()
