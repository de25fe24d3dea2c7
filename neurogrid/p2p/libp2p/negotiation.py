"""Negotiate a protocol in one round trip: the first proposal goes along with multistream-select's own name.

py-libp2p 0.8.1 waits for the peer's answer to the name before it proposes anything, at each stream, and twice at each
connection. Nothing in the specification asks for that, and go-libp2p does not wait either. The peer that serves
reads one line after the other, and notices nothing.

Source: https://github.com/libp2p/specs/blob/master/connections/README.md ("multistream-select").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import TProtocol
from libp2p.protocol_muxer.multiselect_client import (
    DEFAULT_NEGOTIATE_TIMEOUT,
    MULTISELECT_PROTOCOL_ID,
    MultiselectClient,
)

__all__ = ["propose_at_once"]


def propose_at_once(libp2p: Any) -> None:
    """Let a host propose without waiting, on its streams and on the connections that it dials."""
    libp2p.multiselect_client = _PromptClient()
    upgrader = libp2p.get_network().upgrader
    for multistream in (upgrader.security_multistream, upgrader.muxer_multistream):
        multistream._selector.multiselect_client = _PromptClient()


class _PromptClient(MultiselectClient):
    async def select_one_of(
        self,
        protocols: Sequence[TProtocol],
        communicator: IMultiselectCommunicator,
        negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT,
    ) -> TProtocol:
        if protocols:
            communicator = _PromptCommunicator(communicator, protocols[0])
        return await super().select_one_of(protocols, communicator, negotiate_timeout)


class _PromptCommunicator(IMultiselectCommunicator):
    """Writes the first proposal behind the name, and not again when it is proposed."""

    def __init__(self, communicator: IMultiselectCommunicator, proposal: str) -> None:
        self._communicator = communicator
        self._proposal: str | None = proposal
        self._is_ahead = False

    async def write(self, msg_str: str) -> None:
        if self._is_ahead and msg_str == self._proposal:
            self._is_ahead, self._proposal = False, None
            return
        await self._communicator.write(msg_str)
        if msg_str == MULTISELECT_PROTOCOL_ID and self._proposal is not None:
            await self._communicator.write(self._proposal)
            self._is_ahead = True

    async def read(self) -> str:
        return await self._communicator.read()
