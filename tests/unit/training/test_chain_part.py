"""A member that is a stage: whose messages can end what it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neurogrid.errors import NeuroGridError, RemoteProtocolError
from neurogrid.p2p import TensorMessage
from neurogrid.training.members.chain_part import ChainPart
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.wire.runs import RunMessage, Start

RUN_FILE = '[model]\nconfig = "x"\n[data]\npath = "x"\n[layout]\nstages = 2\n[stop]\nsteps = 4\n'


@pytest.mark.parametrize("sender", ["leader", "neighbour", "stranger"])
def test_only_those_that_something_is_waited_for_from_end_a_step(sender: str) -> None:
    """Anybody in the cluster may send a tensor that is refused."""
    start = Start(
        run=bytes(16),
        lease=1,
        seat=1,
        run_file=RUN_FILE,
        config="{}",
        kind="causal-lm",
        manifest=bytes(32),
        num_parameters=1,
        total_steps=4,
    )
    host: Any = SimpleNamespace(addresses=(), peer_id="own")
    nothing: Any = None
    part = ChainPart(host, nothing, "leader", start, nothing, MemberSettings(), lambda: None)
    faults: list[NeuroGridError] = []

    def refuse(code: object, sender: str, message: TensorMessage) -> None:
        raise RemoteProtocolError("it is not due")

    stage: Any = SimpleNamespace(contacts=frozenset({"neighbour"}), take=refuse, fail=faults.append)
    part._stage = stage
    with pytest.raises(RemoteProtocolError, match="not due"):
        part.take_message(TensorMessage(RunMessage.HIDDEN, data=b"", from_peer=sender))
    assert bool(faults) == (sender != "stranger")
