"""A data node that has other data than the run whose ticket it was given."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.training.leading.data_node import _tell
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.sources import Sources
from neurogrid.training.wire.runs import Hold, run_table
from tests.unit.training.test_manifest import TEXT


async def test_it_ends_with_a_sentence() -> None:
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as leader,
            network.open_host() as node,
        ):
            leading, serving = Exchange(leader, run_table()), Exchange(node, run_table())
            Sources(leading, bytes(16), TEXT, bytes(32), (), "data", QuietProgress())
            await node.connect(leader.addresses[0])
            await serving.open(leader.peer_id)
            with pytest.raises(ConfigurationError) as told:
                await _tell(serving, leader.peer_id, Hold(b"x" * 32, 3, ()), QuietProgress())
    assert str(told.value) == (
        "the leader takes no data from here: this run trains on other data: their manifests differ. Name the directory "
        "that its run was begun with, or take the ticket of another run"
    )
