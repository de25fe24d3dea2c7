"""Activations that cross the end of their session: told to whoever waits, and no reason for a warning."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from neurogrid.errors import PeerRefusedError, RequestRefusedError, ResponseTimeout
from neurogrid.inference.sessions.activations import WorkerActivations
from neurogrid.inference.sessions.table import MAX_REMEMBERED, Session, SessionTable
from neurogrid.p2p import Protocol, TensorMessage
from neurogrid.p2p.exchange.routes import Place
from neurogrid.p2p.wire import ErrorCode, MessageType, Route, TensorEnvelope
from tests.unit.blocking_pair import open_two

COORDINATOR, WORKER, STRANGER = "coordinator", "worker", "stranger"


class Worker:
    """What serves activations, with sessions that are opened and closed by the test, and no model."""

    def __init__(self) -> None:
        self.sessions = SessionTable(on_drop=lambda session: None)
        protocol = SimpleNamespace(refuse=self._refuse)
        state: Any = SimpleNamespace(require_tenant=self._require_tenant, protocol=protocol)
        self.refused: list[tuple[str | None, int, ErrorCode]] = []
        self.activations = WorkerActivations(state, cast(Any, None), self.sessions, cast(Any, None))

    @staticmethod
    def _require_tenant(peer_id: str) -> None:
        if peer_id != COORDINATOR:
            raise RequestRefusedError("busy", code=ErrorCode.UNAUTHORIZED)

    async def _refuse(self, message: TensorMessage, error: RequestRefusedError) -> None:
        self.refused.append((message.from_peer, message.request_id, ErrorCode(error.code)))

    def run_session(
        self, session_id: int, *, predecessor: str | None = None, is_closed: bool = True
    ) -> None:
        """Open a session, and close it again, or drop it."""
        place: Any = None
        if predecessor is not None:
            place = Place(cast(Route, SimpleNamespace(peers=(predecessor, "this one"))), 1)
        no: Any = None
        session = Session(session_id, COORDINATOR, no, 0, 4, 64, no, place, last_used=0.0)
        self.sessions.add(session)
        if is_closed:
            self.sessions.close(session_id, COORDINATOR)
        else:
            self.sessions.drop(session)

    def activation(self, session_id: int, sender: str) -> None:
        """One comes."""
        envelope = TensorEnvelope(
            session_id=session_id,
            start_layer=0,
            stop_layer=4,
            position=0,
            dtype="F32",
            shape=(1, 1, 8),
            data=bytes(32),
        )
        message = TensorMessage(
            msg_type=MessageType.ACTIVATION, request_id=1, envelope=envelope, from_peer=sender
        )
        trio.run(self.activations.serve, message)


def test_a_coordinator_is_refused_what_crossed_the_end_of_its_session_without_a_warning() -> None:
    worker = Worker()
    worker.run_session(7)
    with pytest.raises(RequestRefusedError, match="session 7 is not open") as late:
        worker.activation(7, COORDINATOR)
    assert late.value.is_expected
    with pytest.raises(RequestRefusedError, match="session 8 is not open") as unknown:
        worker.activation(8, COORDINATOR)
    assert not unknown.value.is_expected


def test_a_coordinator_whose_session_was_dropped_is_told_what_another_worker_handed_on() -> None:
    """It waits for what comes of it, and has not closed the session: that had no step for long, or gave way."""
    worker = Worker()
    worker.run_session(7, predecessor=WORKER)
    worker.run_session(9, predecessor=WORKER, is_closed=False)
    worker.activation(7, WORKER)
    assert worker.refused == []
    worker.activation(9, WORKER)
    assert worker.refused == [(COORDINATOR, 1, ErrorCode.SESSION_UNKNOWN)]
    worker.sessions.close(9, COORDINATOR)  # it knows by now
    worker.activation(9, WORKER)
    assert len(worker.refused) == 1


def test_nobody_else_is_excused_by_it() -> None:
    worker = Worker()
    worker.run_session(7)
    worker.run_session(9, predecessor=WORKER)
    worker.activation(9, WORKER)  # it knows of no end yet, and waits for nothing
    for session_id in (7, 9):
        with pytest.raises(RequestRefusedError) as refused:
            worker.activation(session_id, STRANGER)
        assert not refused.value.is_expected


def test_what_ended_long_ago_is_not_remembered() -> None:
    worker = Worker()
    for session_id in range(1, MAX_REMEMBERED + 2):
        worker.run_session(session_id)
    with pytest.raises(RequestRefusedError) as forgotten:
        worker.activation(1, COORDINATOR)
    assert not forgotten.value.is_expected


def test_what_is_expected_is_logged_for_those_who_look_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with open_two() as hosts:
            client, server = map(Protocol, hosts)

            async def refuse(message: TensorMessage) -> None:
                crossed = message.request_id == 2
                raise RequestRefusedError(
                    f"{crossed=}", code=ErrorCode.SESSION_UNKNOWN, is_expected=crossed
                )

            server.on_message(MessageType.GPU_INFO_REQUEST, refuse)
            await client.host.connect(server.host.addresses[0])
            for number in (1, 2):
                request = TensorMessage(msg_type=MessageType.GPU_INFO_REQUEST, request_id=number)
                with pytest.raises(PeerRefusedError, match="crossed"):
                    await client.request(
                        server.host.peer_id, request, MessageType.GPU_INFO, timeout=30
                    )

    with caplog.at_level(logging.DEBUG, "neurogrid.p2p.exchange.dispatcher"):
        trio.run(main)
    levels = {r.getMessage().rpartition(" ")[2]: r.levelname for r in caplog.records}
    assert levels["crossed=False"] == "WARNING"
    assert levels["crossed=True"] == "DEBUG"


def test_what_becomes_of_a_request_that_was_given_up_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codes = (ErrorCode.SESSION_UNKNOWN, ErrorCode.PEER_UNREACHABLE, ErrorCode.COMPUTE_FAILED)

    async def main() -> None:
        async with open_two() as hosts:
            client, server = map(Protocol, hosts)
            given_up = trio.Event()

            async def refuse(message: TensorMessage) -> None:
                await given_up.wait()
                code = codes[message.request_id - 1]
                raise RequestRefusedError(code.name, code=code, is_expected=True)

            async def ask(number: int) -> None:
                request = TensorMessage(msg_type=MessageType.GPU_INFO_REQUEST, request_id=number)
                with pytest.raises(ResponseTimeout):
                    await client.request(
                        server.host.peer_id, request, MessageType.GPU_INFO, timeout=1
                    )

            server.on_message(MessageType.GPU_INFO_REQUEST, refuse)
            await client.host.connect(server.host.addresses[0])
            async with trio.open_nursery() as nursery:
                for number in range(1, len(codes) + 1):
                    nursery.start_soon(ask, number)
            given_up.set()
            with trio.fail_after(30):
                while caplog.text.count(" reports: ") < len(codes):
                    await trio.sleep(0.01)

    with caplog.at_level(logging.DEBUG, "neurogrid.p2p.exchange.dispatcher"):
        trio.run(main)
    said = [record for record in caplog.records if " reports: " in record.getMessage()]
    levels = {record.getMessage().rpartition(" ")[2]: record.levelname for record in said}
    assert levels == dict(zip([c.name for c in codes], ("DEBUG", "DEBUG", "WARNING"), strict=True))
