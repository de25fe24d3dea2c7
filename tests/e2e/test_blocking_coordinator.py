"""What a coordinator tells of itself to a program that is not on trio, with a real worker."""

from __future__ import annotations

from neurogrid import CoordinatorSettings, blocking
from neurogrid.fleet.board.status import Phase
from tests.e2e.support import WorkerProcess


def test_it_tells_how_it_is(workers: list[WorkerProcess]) -> None:
    worker = workers[0]
    settings = CoordinatorSettings(peers=(worker.address,), max_seq_len=64)
    with blocking.open_coordinator(settings) as coordinator:
        assert coordinator.why_not_ready is None
        assert all(address.endswith(coordinator.peer_id) for address in coordinator.addresses)
        text = coordinator.complete("A function", max_tokens=8)
        assert text
        status = coordinator.status()
    assert status.peer_id == coordinator.peer_id
    assert (status.phase, status.total_layers, status.num_requests) == (Phase.READY, 8, 1)
    assert status.num_tokens == 8
    (stage,) = status.stages
    assert stage.peer_id == worker.peer_id
    step = status.peers[worker.peer_id].step_seconds
    assert step is not None
    assert step > 0
