"""The first proposal goes along with the name; what the peer answers is dealt with as ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio
from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import TProtocol
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID

from neurogrid.p2p import open_host
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.libp2p.negotiation import _PromptClient

NAME = MULTISELECT_PROTOCOL_ID


class Peer(IMultiselectCommunicator):
    """Answers with the lines of a script; notes what was written, and where it was waited for."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.log: list[str] = []

    async def write(self, msg_str: str) -> None:
        self.log.append(msg_str)

    async def read(self) -> str:
        self.log.append("?")
        return self.answers.pop(0)


def select(peer: Peer, protocols: Sequence[str]) -> str:
    async def main() -> str:
        return await _PromptClient().select_one_of([TProtocol(name) for name in protocols], peer)

    return trio.run(main)


@pytest.mark.parametrize(
    ("answers", "log"),
    [
        ([NAME, "/1"], [NAME, "/1", "?", "?"]),
        ([NAME, "na", "/2"], [NAME, "/1", "?", "?", "/2", "?"]),
        # A peer that begins again, as some do, is followed once.
        ([NAME, NAME, NAME, "/1"], [NAME, "/1", "?", "?", NAME, "?", "/1", "?"]),
    ],
)
def test_what_is_written_and_when_it_is_waited(answers: list[str], log: list[str]) -> None:
    peer = Peer(*answers)
    assert select(peer, ["/1", "/2"]) == answers[-1]
    assert peer.log == log


@pytest.mark.parametrize(
    "answers", [["/other/1.0.0"], [NAME, "what?"], [NAME, "na", "na"], [NAME, "/2"]]
)
def test_a_peer_that_agrees_to_nothing(answers: list[str]) -> None:
    with pytest.raises(MultiselectClientError):
        select(Peer(*answers), ["/1", "/2"])


def test_nothing_to_propose() -> None:
    with pytest.raises(MultiselectClientError):
        select(Peer(NAME), [])


async def test_every_negotiation_of_a_host_is_prompt() -> None:
    async with open_host() as host:
        libp2p: Any = cast(Libp2pHost, host).libp2p
        upgrader = libp2p.get_network().upgrader
        for client in (
            libp2p.multiselect_client,
            upgrader.security_multistream.multiselect_client,
            upgrader.muxer_multistream.multiselect_client,
        ):
            assert isinstance(client, _PromptClient)
