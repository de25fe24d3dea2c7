"""What workers say to a session that is opened on them, believed or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from neurogrid.errors import NoRouteError, PeerRefusedError, RemoteProtocolError
from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.remote_v11 import RemoteWorkerV11
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import PriorLostError, open_session
from neurogrid.inference.pipeline.session_worker import Opened, Prior
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import ErrorCode, MessageType, SessionAck, SessionOpen, TensorMessage
from neurogrid.planner import PlannedStage


class Worker:
    """Says that a session has tokens already."""

    takes_chunks = takes_priors = True
    timeouts = Timeouts()
    peer_id = "a worker"

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def open_session(self, wanted: SessionOpen) -> Opened:
        return Opened(length=5)

    async def close_session(self, session_id: int) -> None:
        self.closed.append(session_id)


async def test_a_worker_that_begins_with_tokens_that_nobody_named_is_to_blame() -> None:
    """The session goes around it, as around one that fails in another way."""
    worker = Worker()
    stage = PipelineStage(PlannedStage("a worker", 0, 2, 10), cast(Any, worker))
    host = SimpleNamespace(identity=Identity.generate(), addresses_of=lambda peer_id: ())
    routing = Routing(cast(Any, SimpleNamespace(host=host)))
    with pytest.raises(NoRouteError, match="5 tokens") as failed:
        await open_session([stage], routing, max_length=8)
    assert failed.value.peer_id == "a worker"
    assert isinstance(failed.value.__cause__, RemoteProtocolError)
    assert len(worker.closed) == 1


class NoMemory(Worker):
    """Has something on disk, and no memory to read it."""

    async def open_session(self, wanted: SessionOpen) -> Opened:
        if not (wanted.stored or wanted.prior):
            return Opened()
        text = "there is no memory for it"
        raise PeerRefusedError(text, code=ErrorCode.OUT_OF_MEMORY, text=text)


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        (Prior(0, 300, stays_open=False, stored=b"n" * 32), PriorLostError),
        (Prior(7, 300, stays_open=True), NoRouteError),
    ],
)
async def test_a_worker_without_memory_for_a_prefix_on_disk_computes_it(
    prior: Prior, expected: type[Exception]
) -> None:
    stage = PipelineStage(PlannedStage("a worker", 0, 2, 10), cast(Any, NoMemory()))
    host = SimpleNamespace(identity=Identity.generate(), addresses_of=lambda peer_id: ())
    routing = Routing(cast(Any, SimpleNamespace(host=host)))
    with pytest.raises(expected, match="no memory"):
        await open_session([stage], routing, max_length=400, prior=prior)
    assert (await open_session([stage], routing, max_length=400)).length == 0


class Asked(RemoteWorkerV11):
    """Notes for how long it is waited for."""

    async def _request(self, *args: Any, timeout: float) -> TensorMessage:
        self.waited = timeout
        return TensorMessage(
            msg_type=MessageType.SESSION_ACK, data=SessionAck(1, adapter=True).encode()
        )


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({}, Timeouts().describe),
        ({"prior": 7, "prior_length": 9}, Timeouts().step),
        ({"stored": b"n" * 32, "prior_length": 9}, Timeouts().layer),
        ({"adapter": b"a" * 64}, Timeouts().layer),
        ({"adapter": b"a" * 64, "prior": 7, "prior_length": 9}, Timeouts().layer),
    ],
)
async def test_a_worker_has_time_for_what_it_does_before_a_session_is_open(
    more: dict[str, Any], seconds: float
) -> None:
    """A worker that does not answer in time is given up, with all that it computes."""
    worker = Asked(cast(Any, None), "a worker", Timeouts())
    await worker.open_session(
        SessionOpen(session_id=1, start_layer=0, stop_layer=2, max_length=16, **more)
    )
    assert worker.waited == seconds
