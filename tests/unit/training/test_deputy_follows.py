"""Whether a deputy's copy is the beginning of the journal: looked at line by line, however long the run has been."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neurogrid.training.leading.deputies.copying import Copying
from neurogrid.training.wire.runs import Follow

RUN = bytes(16)


def copying_of(path: Path) -> Copying:
    """A leader's part that has this journal; nothing is sent."""
    exchange: Any = SimpleNamespace(
        host=SimpleNamespace(peer_id="leader"), on_message=lambda *given: None
    )
    journal: Any = SimpleNamespace(path=path, num_bytes=path.stat().st_size, entries=())
    facts: Any = SimpleNamespace(run_id=RUN)
    return Copying(exchange, journal, facts, cast(Any, None), cast(Any, None))


def follow(data: bytes, **other: object) -> Follow:
    """What a deputy says that has a copy of these lines."""
    lines = data.split(b"\n")[:-1]
    digest = hashlib.sha256(lines[-1]).digest() if lines else bytes(32)
    told = Follow(run=RUN, line=len(lines), digest=digest, num_bytes=len(data))
    return replace(told, **cast("dict[str, Any]", other))


@pytest.mark.parametrize(
    ("other", "is_copy"),
    [
        ({}, True),
        ({"line": 1}, False),
        ({"line": 3}, False),
        ({"digest": bytes(32)}, False),
        ({"num_bytes": 5}, False),
        ({"num_bytes": 7}, False),
        ({"num_bytes": 0}, False),
        ({"num_bytes": 100}, False),
        ({"run": bytes([1] * 16)}, False),
    ],
)
async def test_a_copy_is_the_beginning_of_the_journal(
    tmp_path: Path, other: dict[str, object], is_copy: bool
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"ab\ncd\nef\n")
    assert copying_of(path)._has(follow(b"ab\ncd\n", **other)) is is_copy


async def test_a_journal_is_not_had_in_memory_for_whoever_wants_to_follow(tmp_path: Path) -> None:
    data = (b"x" * 4095 + b"\n") * 8192
    path = tmp_path / "journal"
    path.write_bytes(data)
    copying, told = copying_of(path), follow(data)
    tracemalloc.start()
    try:
        assert copying._has(told)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) / 16
