"""Which peer may extend a session: along a route its predecessor alone, whoever else is on it."""

from __future__ import annotations

from typing import Any

import pytest

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.table import Session, SessionTable
from neurogrid.p2p.exchange.routes import Place
from neurogrid.p2p.wire import ErrorCode, Route

COORDINATOR, STRANGER, PEERS = "coordinator", "stranger", ("first", "second", "third")
ROUTE = Route(7, 1_800_000_000, PEERS, (0, 2, 4, 6))


@pytest.mark.parametrize(
    ("index", "source"), [(None, COORDINATOR), (0, COORDINATOR), (1, "first"), (2, "second")]
)
def test_serving_takes_activations_forward_alone(index: int | None, source: str) -> None:
    place = None if index is None else Place(ROUTE, index)
    no: Any = None  # neither a model nor a cache is looked at
    session = Session(7, COORDINATOR, no, 0, 2, 64, no, place, last_used=0.0)
    table = SessionTable(on_drop=lambda session: None)
    table.add(session)
    assert table.find(7, source) is session
    for sender in {COORDINATOR, STRANGER, *PEERS} - {source}:
        with pytest.raises(RequestRefusedError, match="takes no activations from") as refused:
            table.find(7, sender)
        assert refused.value.code == ErrorCode.UNAUTHORIZED
