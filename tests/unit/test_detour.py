"""Workers that take long to reach each other: a generation on a detour does not wait for them, another one does."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import MockClock

from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import PipelineSession, open_session
from neurogrid.inference.pipeline.session_worker import Opened, Prior
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import SessionOpen
from neurogrid.planner import PlannedStage

# Seconds until the first worker has a link to the second.
LINK_SECONDS = 7.0


class Worker:
    takes_chunks = takes_priors = True
    timeouts = Timeouts()

    def __init__(self, peer_id: str, seconds: float) -> None:
        self.peer_id = peer_id
        self._seconds = seconds
        self.num_open = 0

    async def open_session(self, wanted: SessionOpen) -> Opened:
        self.num_open += 1
        if wanted.route:
            await trio.sleep(self._seconds)
        return Opened(wanted.prior_length)

    async def close_session(self, session_id: int) -> None:
        self.num_open -= 1


def opened(link_patience: float, prior: Prior | None = None) -> tuple[PipelineSession, float]:
    """A session over two workers, and the seconds until it was open."""
    peer_ids = [Identity.generate().peer_id for _ in range(2)]
    workers = [Worker(peer_ids[0], LINK_SECONDS), Worker(peer_ids[1], 0.0)]
    stages = [
        PipelineStage(PlannedStage(peer_id, 2 * at, 2 * at + 2, 10), cast(Any, worker))
        for at, (peer_id, worker) in enumerate(zip(peer_ids, workers, strict=True))
    ]
    host = SimpleNamespace(identity=Identity.generate(), addresses_of=lambda peer_id: ())

    async def main() -> tuple[PipelineSession, float]:
        routing = Routing(cast(Any, SimpleNamespace(host=host)))
        started = trio.current_time()
        session = await open_session(
            stages, routing, max_length=8, prior=prior, link_patience=link_patience
        )
        assert [worker.num_open for worker in workers] == [1, 1]
        return session, trio.current_time() - started

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_link_that_takes_long_is_taken_over_where_somebody_waits_for_a_token() -> None:
    session, seconds = opened(2.0)
    assert [len(chain.stages) for chain in session.chains] == [1, 1]
    assert 2.0 <= seconds < LINK_SECONDS


def test_a_link_has_its_time_otherwise() -> None:
    session, seconds = opened(math.inf)
    assert [len(chain.stages) for chain in session.chains] == [2]
    assert seconds >= LINK_SECONDS


def test_a_worker_that_reads_a_prefix_from_disk_has_its_time() -> None:
    """What takes that long is not the link: it would go through the coordinator for minutes."""
    session, seconds = opened(2.0, Prior(0, 5, stays_open=False, stored=b"n" * 32))
    assert [len(chain.stages) for chain in session.chains] == [2]
    assert seconds >= LINK_SECONDS
    assert session.length == 5
