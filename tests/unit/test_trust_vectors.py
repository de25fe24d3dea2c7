"""Trust against `protocol_spec/vectors/trust/`, which were written from the specification."""

from __future__ import annotations

from typing import Any

import pytest

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.trust import (
    OPEN_PROTOCOLS,
    TRUST_PROTOCOL,
    Certificate,
    JoinToken,
    Refusal,
    RefusedError,
    RevocationList,
    Ticket,
    limits,
)
from neurogrid.p2p.trust.messages import Credentials, Verdict
from neurogrid.p2p.trust.signing import cluster_id_of
from neurogrid.p2p.wire import ErrorCode
from tests.unit.vectors import SPECIFICATION, in_turn, names, subject

SIGNED: dict[str, Any] = {
    "trust/certificate": Certificate,
    "trust/join_token": JoinToken,
    "trust/revocation_list": RevocationList,
}
MESSAGES: dict[str, Any] = {"trust/credentials": Credentials, "trust/verdict": Verdict}


def plain(value: object) -> object:
    """A field as the vectors write it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, frozenset):
        ordered = sorted(value)
        return [str(item) for item in ordered]
    return value


def fields_of(value: object, expected: dict[str, Any]) -> dict[str, Any]:
    fields = {name: plain(getattr(value, name)) for name in expected}
    # 64-bit numbers stand in the vectors as strings, since JSON readers differ past 2**53.
    return {
        name: str(field) if isinstance(expected[name], str) else field
        for name, field in fields.items()
    }


@in_turn(*SIGNED)
def test_signed_forms(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    public_key = bytes.fromhex(subject(name)["public_key"])
    if case["result"] == "invalid":
        with pytest.raises(RefusedError) as caught:
            SIGNED[name].decode(data, public_key)
        assert caught.value.reason.name == case["error"]
        return
    assert fields_of(SIGNED[name].decode(data, public_key), case["fields"]) == case["fields"]


@in_turn(*MESSAGES)
def test_messages(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if case["result"] == "invalid":
        with pytest.raises(RemoteProtocolError) as caught:
            MESSAGES[name].decode(data)
        assert ErrorCode(caught.value.code).name == case["error"]
        return
    message = MESSAGES[name].decode(data)
    assert fields_of(message, case["fields"]) == case["fields"]
    if case.get("canonical", True):
        assert message.encode() == data


@in_turn("trust/ticket")
def test_tickets(name: str, case: Any) -> None:
    if case["result"] == "invalid":
        with pytest.raises(ConfigurationError, match=case["error"]):
            Ticket.parse(case["text"], now=case["now"])
        return
    ticket = Ticket.parse(case["text"], now=case["now"])
    assert {
        "cluster_id": ticket.cluster_id,
        "peer_id": ticket.peer_id,
        "addresses": list(ticket.addresses),
        "relays": list(ticket.relays),
        "token": ticket.token.data.hex(),
    } == case["fields"]
    if case.get("canonical", True):
        assert ticket.text() == case["text"]


@pytest.mark.parametrize("name", names("trust/*"))
def test_every_file_is_read_and_names_its_cluster(name: str) -> None:
    file = subject(name)
    assert name in {*SIGNED, *MESSAGES, "trust/ticket"}
    assert (SPECIFICATION / file["specification"]).exists()
    assert cluster_id_of(bytes.fromhex(file["public_key"])) == file["cluster"]
    ids = [case["id"] for case in file["cases"]]
    assert len(ids) == len(set(ids))
    assert {case["result"] for case in file["cases"]} == {"valid", "invalid"}


def test_the_chapter_names_every_reason_protocol_and_bound() -> None:
    text = (SPECIFICATION / "trust.md").read_text(encoding="utf-8")
    for reason in Refusal:
        assert f"| {reason.value} | {reason.name} |" in text
    for protocol_id in OPEN_PROTOCOLS | {TRUST_PROTOCOL}:
        assert protocol_id in text
    numbers = text.replace(",", "")
    for bound in (
        limits.MAX_CERTIFICATE_BYTES,
        limits.MAX_TOKEN_BYTES,
        limits.MAX_REVOCATION_BYTES,
        limits.MAX_MESSAGE_BYTES,
        limits.MAX_REVOKED,
        limits.MAX_TEXT_CHARS,
        limits.MAX_TICKET_CHARS,
        limits.MAX_TOKEN_USES,
        limits.MAX_UNADMITTED,
        limits.MAX_HELD_STREAMS,
        limits.MAX_ADDRESSES,
        limits.MAX_RELAYS,
        limits.ADMISSION_TIMEOUT,
        limits.RECHECK_INTERVAL,
        limits.ISSUER_RECHECK_INTERVAL,
        limits.CLOCK_SKEW,
        limits.GOODBYE_TIMEOUT,
        limits.CERTIFICATE_LIFETIME / 86_400,
    ):
        assert f" {bound:g}" in numbers, bound
