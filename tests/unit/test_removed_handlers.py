"""A protocol that is taken out of a host while a peer asks for it: that stream is reset, and the host lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from libp2p.abc import IMultiselectCommunicator, INetStream
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, Multiselect

from neurogrid.p2p.libp2p.libp2p_host import _Handlers

PROTOCOL = "/test/1"


class Asker(IMultiselectCommunicator):
    """Asks for a protocol, and something happens in the moment in which it is granted."""

    def __init__(self, when_granted: Callable[[], None]) -> None:
        self._says = [MULTISELECT_PROTOCOL_ID, PROTOCOL]
        self._when_granted = when_granted

    async def read(self) -> str:
        return self._says.pop(0)

    async def write(self, text: str) -> None:
        if text == PROTOCOL:
            self._when_granted()


@pytest.mark.parametrize(
    "handlers",
    [
        _Handlers,
        pytest.param(dict, id="stock", marks=pytest.mark.xfail(raises=KeyError, strict=True)),
    ],
)
async def test_a_protocol_may_end_while_a_peer_asks_for_it(handlers: Callable[[], Any]) -> None:
    async def serve(stream: INetStream) -> None:
        raise AssertionError("not reached")

    multiselect = Multiselect()
    multiselect.handlers = handlers()
    multiselect.add_handler(PROTOCOL, serve)  # type: ignore[arg-type]
    asker = Asker(lambda: multiselect.remove_handler(PROTOCOL))  # type: ignore[arg-type]
    granted, handler = await multiselect.negotiate(asker)
    assert granted == PROTOCOL
    assert handler is INetStream.reset
