"""Multicast DNS on real interfaces: what the system refuses for a while ends nothing."""

from __future__ import annotations

import errno
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from neurogrid.p2p.discovery.mdns import service
from neurogrid.p2p.discovery.mdns.engine import Engine
from neurogrid.p2p.discovery.sighting import Attempt
from neurogrid.p2p.hosts.host import Host


async def test_interfaces_that_cannot_be_looked_up_now_are_looked_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[Attempt] = []
    answers: list[Any] = [OSError(errno.EMFILE, "Too many open files"), []]

    def list_interfaces() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(service, "list_interfaces", list_interfaces)
    engine = Engine(
        "us",
        peer_name="us",
        expiry=120.0,
        random=Random(0),
        on_sighting=lambda _: None,
        on_attempt=attempts.append,
    )
    host = cast(Host, SimpleNamespace(listen_addresses=()))
    async with trio.open_nursery() as nursery:
        ours = service._Service(host, engine, ("eth0",), attempts.append, nursery)
        await ours.scan()
        assert [(a.what, a.outcome) for a in attempts] == [
            ("look for interfaces", "Too many open files")
        ]
        await ours.scan()
        assert attempts[-1].outcome == "not used: there is no such interface now"
        nursery.cancel_scope.cancel()
