"""A port belongs to one host, also where several begin at the same moment."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.p2p import open_host
from tests.ports import free_port

NUM_HOSTS = 3


@pytest.mark.parametrize("with_fallback", [True, False])
def test_one_of_those_that_begin_together_gets_the_port(with_fallback: bool) -> None:
    port = free_port()
    fallback = ("/ip4/127.0.0.1/tcp/0",) if with_fallback else ()
    ports: list[int] = []
    refused: list[str] = []

    async def begin(nursery: trio.Nursery) -> None:
        try:
            async with open_host(
                listen=(f"/ip4/127.0.0.1/tcp/{port}",), listen_fallback=fallback
            ) as host:
                ports.append(int(host.addresses[0].split("/")[4]))
                if len(ports) + len(refused) == NUM_HOSTS:
                    nursery.cancel_scope.cancel()
                await trio.sleep_forever()
        except ConfigurationError as exc:
            refused.append(str(exc))
            if len(ports) + len(refused) == NUM_HOSTS:
                nursery.cancel_scope.cancel()

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(NUM_HOSTS):
                    nursery.start_soon(begin, nursery)

    trio.run(main)
    assert ports.count(port) == 1
    if with_fallback:
        assert len(set(ports)) == NUM_HOSTS
    else:
        assert len(ports) == 1
        assert all(f"/tcp/{port}: address already in use" in why for why in refused)
