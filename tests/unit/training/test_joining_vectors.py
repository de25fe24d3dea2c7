"""Records of joining against `protocol_spec/vectors/joining/`, which were written from the specification."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.joining import (
    MAX_BAN_BYTES,
    MAX_BANS,
    MAX_INVITATION_BYTES,
    Ban,
    Invitation,
    JoinRules,
)
from tests.unit.vectors import SPECIFICATION, in_turn, names, subject

RECORDS: dict[str, Any] = {"joining/invitation": Invitation, "joining/ban": Ban}
DECIMAL = ("serial", "number")


def plain(name: str, value: object) -> object:
    """A field as the vectors write it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if name in DECIMAL else value


@in_turn(*RECORDS)
def test_records(name: str, case: Any) -> None:
    data, signer = bytes.fromhex(case["hex"]), subject(name)["signer"]
    if case["result"] == "invalid":
        with pytest.raises(RemoteProtocolError) as caught:
            RECORDS[name].open(data, signer)
        assert ErrorCode(caught.value.code).name == case["error"]
        return
    record = RECORDS[name].open(data, signer)
    assert {field: plain(field, getattr(record, field)) for field in case["fields"]} == case[
        "fields"
    ]


def test_every_file_is_read_and_has_a_chapter() -> None:
    assert set(names("joining/*")) == set(RECORDS)
    text = (SPECIFICATION / "training" / "joining.md").read_text(encoding="utf-8").replace(",", "")
    rules = JoinRules(max_members=1)
    for bound in (
        *(MAX_BAN_BYTES, MAX_INVITATION_BYTES, MAX_BANS),
        *(rules.max_trials, rules.max_waiting, rules.wait_seconds, rules.trial_seconds),
        *(rules.trial_rounds, rules.max_starts, rules.window_seconds, rules.retry_seconds),
    ):
        assert f" {bound:g} " in text, bound


def test_what_is_signed_is_read_again_and_is_canonical() -> None:
    leader, peer = Identity.generate(), Identity.generate()
    address = f"/ip4/192.0.2.1/tcp/9000/p2p/{leader.peer_id}"
    invitation = Invitation(bytes(16), leader.peer_id, 5, 10, 20, 3, "trainer", True, (address,))
    assert Invitation.open(invitation.sign(leader), leader.peer_id) == invitation
    ban = Ban(bytes(16), leader.peer_id, peer.peer_id, 1, 10, 20, bytes(32))
    assert Ban.open(ban.sign(leader), leader.peer_id) == ban
    assert ban.sign(leader) == ban.sign(leader)
    with pytest.raises(RemoteProtocolError):
        Ban.open(invitation.sign(leader), leader.peer_id)
    name = "/dns4/" + "é" * 440 + f"/p2p/{leader.peer_id}"
    long = Invitation(bytes(16), leader.peer_id, 5, 10, 20, addresses=(name,) * 16)
    with pytest.raises(LocalProtocolError):
        long.sign(leader)


@given(st.binary(max_size=400), st.sampled_from(list(RECORDS)))
def test_arbitrary_bytes_are_refused(data: bytes, name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        RECORDS[name].open(data, subject(name)["signer"])


@pytest.mark.parametrize("name", RECORDS)
def test_no_bit_of_a_record_can_be_changed(name: str) -> None:
    data = bytes.fromhex(next(case["hex"] for case in subject(name)["cases"]))
    for at in range(0, 8 * len(data), 5):
        altered = bytearray(data)
        altered[at // 8] ^= 1 << at % 8
        with pytest.raises(RemoteProtocolError):
            RECORDS[name].open(bytes(altered), subject(name)["signer"])
