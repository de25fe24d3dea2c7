"""Member records: their bytes against the vectors and against any bytes, and which of them are believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair

from neurogrid.errors import LocalProtocolError, NeuroGridError
from neurogrid.p2p.discovery.dht_key import cluster_cid, cluster_key
from neurogrid.p2p.discovery.records import (
    MemberRecord,
    RecordFault,
    RecordRefusedError,
    SignedRecord,
    layer_ranges,
    open_record,
    sign_record,
)
from neurogrid.p2p.discovery.records_book import MAX_LIFETIME, RecordBook
from neurogrid.p2p.hosts.identity import Identity
from tests.unit.vectors import in_turn, subject
from tests.unit.wire_strategies import BRIEF

SUBJECT = subject("record")
NOW = 1_800_000_000
OWN = Identity._of(create_new_key_pair(b"\1" * 32))
MEMBER = Identity._of(create_new_key_pair(b"\2" * 32))
KEY = cluster_key("one")
RECORD = MemberRecord(
    cluster=KEY,
    peer_id=MEMBER.peer_id,
    sequence=7,
    expires=NOW + 600,
    role="worker",
    addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{MEMBER.peer_id}",),
    model="tiny",
    free_memory=2**33,
    layers=((0, 4), (6, 7)),
    certificate=b"proof",
)


@pytest.mark.parametrize("case", SUBJECT["keys"], ids=lambda case: case["namespace"])
def test_the_key_of_a_cluster(case: dict[str, str]) -> None:
    assert cluster_key(case["namespace"]).hex() == case["key"]
    assert cluster_cid(case["namespace"]).hex() == case["cid"]


@in_turn("record")
def test_a_record_of_the_vectors(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if case["result"] != "valid":
        with pytest.raises(RecordRefusedError) as caught:
            open_record(data)
        assert caught.value.fault.value == case["result"]
        return
    fields = case["fields"]
    record = open_record(data)
    assert record == MemberRecord(
        cluster=bytes.fromhex(fields["cluster"]),
        peer_id=fields["peer"],
        sequence=int(fields["sequence"]),
        expires=fields["expires"],
        role=fields["role"],
        addresses=tuple(fields["addresses"]),
        model=fields["model"],
        free_memory=int(fields["free_memory"]),
        layers=tuple((start, stop) for start, stop in fields["layers"]),
        certificate=bytes.fromhex(fields["certificate"]),
    )
    if case.get("canonical", True):
        identity = Identity._of(create_new_key_pair(bytes.fromhex(SUBJECT["private_key"])))
        assert sign_record(record, identity) == data


@BRIEF
@given(
    sequence=st.integers(1, 2**64 - 1),
    expires=st.integers(0, 2**64 - 1),
    role=st.sampled_from(["worker", "coordinator", "peer"]),
    ports=st.lists(st.integers(0, 65535), max_size=16),
    model=st.text(st.characters(categories=["L", "N", "P"]), max_size=256),
    free_memory=st.integers(0, 2**64 - 1),
    layers=st.sets(st.integers(0, 1000), max_size=60),
    certificate=st.binary(max_size=4096),
)
def test_what_is_signed_is_what_is_read(ports: list[int], layers: set[int], **fields: Any) -> None:
    addresses = tuple(f"/ip4/10.0.0.1/tcp/{port}/p2p/{MEMBER.peer_id}" for port in ports)
    ranges = layer_ranges(layers)
    assert {layer for start, stop in ranges for layer in range(start, stop)} == layers
    record = MemberRecord(
        cluster=KEY, peer_id=MEMBER.peer_id, addresses=addresses, layers=ranges, **fields
    )
    assert open_record(sign_record(record, MEMBER)) == record


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    with pytest.raises(RecordRefusedError):
        open_record(data)


@given(st.data())
def test_a_record_that_was_altered_anywhere_is_refused(data: st.DataObject) -> None:
    signed = bytearray(sign_record(RECORD, MEMBER))
    place = data.draw(st.integers(0, len(signed) - 1))
    signed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordRefusedError):
        open_record(bytes(signed))


def test_a_signature_for_something_else_does_not_count() -> None:
    encoded = RECORD.encode()
    bare = SignedRecord(encoded, MEMBER.key_pair.private_key.sign(encoded)).encode()
    with pytest.raises(RecordRefusedError, match="forged"):
        open_record(bare)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "king"},
        {"sequence": 0},
        {"addresses": (f"/ip4/127.0.0.1/tcp/1/p2p/{OWN.peer_id}",)},
        {"addresses": ("/ip4/127.0.0.1/tcp/1",)},
        {"addresses": RECORD.addresses * 17},
        {"layers": ((4, 4),)},
        {"layers": ((4, 6), (6, 8))},
        {"layers": ((4, 6), (0, 2))},
        {"certificate": bytes(4097)},
        {"model": "m" * 257},
        {"peer_id": "not base58!"},
        {"peer_id": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"},
        {"cluster": b"short"},
    ],
)
def test_what_would_be_refused_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises((LocalProtocolError, RecordRefusedError)):
        sign_record(replace(RECORD, **changes), MEMBER)


class Clock:
    now = float(NOW)

    def __call__(self) -> float:
        return self.now


def book(clock: Clock | None = None, **options: Any) -> RecordBook:
    return RecordBook(KEY, OWN.peer_id, now=clock or Clock(), **options)


def signed(**changes: Any) -> bytes:
    return sign_record(replace(RECORD, **changes), MEMBER)


def fault_of(book: RecordBook, data: bytes, from_peer: str = MEMBER.peer_id) -> RecordFault:
    with pytest.raises(RecordRefusedError) as caught:
        book.accept(data, from_peer=from_peer)
    return caught.value.fault


def test_a_member_is_believed_until_its_record_expires() -> None:
    clock = Clock()
    members = book(clock, clock_skew=60)
    accepted = members.accept(signed(), from_peer=MEMBER.peer_id)
    assert (accepted.record, accepted.is_new, accepted.has_moved) == (RECORD, True, False)
    clock.now = NOW + 659
    assert not members.expire()
    assert members.members == {MEMBER.peer_id: RECORD}
    clock.now = NOW + 660
    assert members.expire() == [RECORD]
    assert not members.members


def test_a_later_record_takes_the_place_of_the_one_before() -> None:
    members = book()
    members.accept(signed(), from_peer=MEMBER.peer_id)
    assert not members.accept(signed(), from_peer=MEMBER.peer_id).is_new  # the same once more
    moved = members.accept(signed(sequence=8, addresses=()), from_peer=MEMBER.peer_id)
    assert (moved.is_new, moved.has_moved) == (False, True)
    assert members.members[MEMBER.peer_id].sequence == 8


@pytest.mark.parametrize("sequence", [1, 6, 7])
def test_an_older_record_is_replayed_also_when_the_newer_has_expired(sequence: int) -> None:
    clock = Clock()
    members = book(clock)
    members.accept(signed(), from_peer=MEMBER.peer_id)
    older = signed(sequence=sequence, expires=NOW + MAX_LIFETIME, free_memory=1)
    assert fault_of(members, older) is RecordFault.REPLAYED
    clock.now = NOW + 1000
    assert members.expire()
    assert fault_of(members, older) is RecordFault.REPLAYED


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (signed(expires=NOW - 61), RecordFault.EXPIRED),
        (signed(expires=NOW + MAX_LIFETIME + 61), RecordFault.MALFORMED),
        (signed(cluster=cluster_key("other")), RecordFault.FOREIGN),
        (sign_record(RECORD, OWN), RecordFault.FORGED),
        (b"\xc1", RecordFault.MALFORMED),
    ],
)
def test_why_a_record_is_refused(data: bytes, fault: RecordFault) -> None:
    members = book()
    assert fault_of(members, data) is fault
    assert not members.members


def test_the_record_of_another_peer_is_not_taken() -> None:
    assert fault_of(book(), signed(), from_peer=OWN.peer_id) is RecordFault.FORGED
    ours = sign_record(replace(RECORD, peer_id=OWN.peer_id, addresses=()), OWN)
    assert fault_of(book(), ours, from_peer=OWN.peer_id) is RecordFault.FORGED


def test_who_is_not_trusted_leaves_no_trace() -> None:
    seen: list[tuple[str, bytes]] = []

    def verify(peer_id: str, role: str, certificate: bytes) -> None:
        seen.append((peer_id, certificate))
        if len(seen) == 1:
            raise NeuroGridError("revoked")

    members = book(verify=verify)
    assert fault_of(members, signed()) is RecordFault.UNTRUSTED
    assert members.accept(signed(), from_peer=MEMBER.peer_id).is_new
    assert seen == [(MEMBER.peer_id, b"proof")] * 2
