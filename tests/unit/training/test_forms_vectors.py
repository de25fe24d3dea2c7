"""The vectors of protocol_spec/training/forms.md, written from it with numbers of Python: bytes, aggregates, parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.aggregators import parse_aggregator
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.parts import Layout, RandomPartitions
from tests.unit.vectors import in_turn

FILE = "training_forms"
UNIT = 1024


def floats(text: str) -> torch.Tensor:
    data = bytearray.fromhex(text)
    return torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)


def in_hex(values: torch.Tensor) -> str:
    return values.numpy().tobytes().hex()


@in_turn(FILE, where=lambda case: "values" in case)
def test_a_sender_writes_the_bytes_of_the_vector(name: str, case: Any) -> None:
    values = floats(case["values"])
    assert len(values) == case["num_elements"]
    assert bytes(parse_codec(case["codec"]).encode(values)).hex() == case["encoded"]


@in_turn(FILE, where=lambda case: "decoded" in case)
def test_a_reader_has_the_elements_of_the_vector(name: str, case: Any) -> None:
    codec = parse_codec(case["codec"])
    decoded = codec.decode(bytes.fromhex(case["encoded"]), case["num_elements"])
    assert in_hex(decoded) == case["decoded"]


@in_turn(FILE, where=lambda case: "error" in case)
def test_a_reader_refuses_what_the_vector_says(name: str, case: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_codec(case["codec"]).decode(bytes.fromhex(case["encoded"]), case["num_elements"])
    assert ErrorCode(caught.value.code).name == case["error"]


@in_turn(FILE, where=lambda case: "aggregator" in case)
def test_aggregates_are_those_of_the_vector(name: str, case: Any) -> None:
    rows = [floats(row) for row in case["rows"]]
    result = parse_aggregator(case["aggregator"]).aggregate(rows, case["weights"])
    assert in_hex(result) == case["aggregate"]


@in_turn(FILE, where=lambda case: "layout" in case)
def test_a_layout_has_the_digest_of_the_vector(name: str, case: Any) -> None:
    names = tuple(tensor["name"] for tensor in case["layout"])
    shapes = tuple(tuple(tensor["shape"]) for tensor in case["layout"])
    assert Layout(names, shapes).digest.hex() == case["digest"]


@in_turn(FILE, where=lambda case: "units" in case)
def test_partitions_are_those_of_the_vector(name: str, case: Any) -> None:
    layout = Layout(("weight",), ((case["num_elements"],),))
    turns = RandomPartitions(layout, len(case["units"]), seed=bytes.fromhex(case["seed"]))
    for turn, units in enumerate(case["units"]):
        expected = {e for u in units for e in range(UNIT * u, UNIT * (u + 1))}
        expected &= set(range(case["num_elements"]))
        assert {e for start, stop in turns.spans(turn) for e in range(start, stop)} == expected
