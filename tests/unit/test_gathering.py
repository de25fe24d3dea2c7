"""The workers of a coordinator are found, whoever dials whom, and whichever comes first."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from neurogrid.fleet.gathering import open_gathering
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.pipeline.remote_workers import remote_worker
from neurogrid.p2p import PROTOCOL_V11, Protocol
from neurogrid.p2p.discovery import Discovery
from neurogrid.p2p.memory import open_memory_network


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_worker_that_has_said_what_it_is_before_anybody_looked_for_it(
    is_named: bool,
) -> None:
    """It dialled while the coordinator began, as with workers of its own that take seconds to start."""
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as here,
            network.open_host() as there,
        ):
            protocol = Protocol(here, role="coordinator", versions=(PROTOCOL_V11,))
            worker = Protocol(there, role="worker", versions=(PROTOCOL_V11,))
            await there.connect(here.addresses[0])
            await worker.open(here.peer_id)
            while protocol.hello_of(there.peer_id) is None:
                await trio.sleep(0.01)
            async with (
                Discovery(here) as discovery,
                open_gathering(
                    protocol,
                    discovery,
                    addresses=there.addresses[:1] if is_named else (),
                    make_worker=partial(remote_worker, protocol, timeouts=Timeouts()),
                    progress=FleetProgress(),
                ) as gathering,
            ):
                (found,) = await gathering.enough(1, 5.0)
                assert found.peer_id == there.peer_id
