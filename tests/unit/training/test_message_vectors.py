"""The vectors of messages.md, runs.md, stages.md, witnessed.md and terms.md of training, written from their tables:
read, refused, and written again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.training import wire
from neurogrid.training.wire import runs
from tests.unit.vectors import in_turn, subject

FILES = (
    "training_messages",
    "run_messages",
    "stage_messages",
    "witnessed_messages",
    "witnessed_audits",
    "term_messages",
)
KINDS = {
    name.removesuffix("Payload"): kind
    for room in (wire, runs)
    for name in room.__all__
    if hasattr(kind := getattr(room, name), "decode")
}


def as_written(value: Any) -> Any:
    """A field as the vectors have it: bytes and nested maps in hex, integers in decimal, tuples of tuples as one."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            value = [part for item in value for part in item]
        return [as_written(item) for item in value]
    if isinstance(value, ControlPayload):
        return value.encode().hex()
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if type(value) is int else value


def kind_of(case: Any) -> type[ControlPayload]:
    kind = KINDS[case["payload"]]
    assert issubclass(kind, ControlPayload)
    return kind


@in_turn(*FILES, where=lambda case: case["result"] == "valid")
def test_what_is_valid_is_read_and_written_again(name: str, case: Any) -> None:
    kind, data = kind_of(case), bytes.fromhex(case["hex"])
    payload = kind.decode(data)
    fields = {f.name: getattr(payload, f.name) for f in dataclasses.fields(payload)}
    assert {key: as_written(value) for key, value in fields.items()} == case["map"]
    assert list(fields) == list(case["map"])
    assert kind.decode(payload.encode()) == payload
    assert (payload.encode() == data) == case.get("canonical", True)


@in_turn(*FILES, where=lambda case: case["result"] == "invalid")
def test_what_is_not_is_refused(name: str, case: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        kind_of(case).decode(bytes.fromhex(case["hex"]))
    assert ErrorCode(caught.value.code).name == case["error"]
    assert "\n" not in str(caught.value)


def test_each_payload_has_vectors_of_both_kinds() -> None:
    for result in ("valid", "invalid"):
        cases = [
            case for name in FILES for case in subject(name)["cases"] if case["result"] == result
        ]
        assert {case["payload"] for case in cases} == KINDS.keys()
