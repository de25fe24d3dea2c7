"""Certificates, tokens, revocations, messages: what was signed is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Certificate,
    JoinToken,
    Refusal,
    RefusedError,
    RevocationList,
)
from neurogrid.p2p.trust.limits import MAX_REVOKED, MAX_TIME
from neurogrid.p2p.trust.messages import Credentials, Verdict
from neurogrid.p2p.trust.names import is_peer_id, is_role
from neurogrid.p2p.trust.signing import CERTIFICATE, cluster_id_of
from neurogrid.p2p.wire.maps import MAX_U64
from tests.unit.wire_strategies import BRIEF

PEER = "12D3KooWDgEoZReqrtYxB12zCLLUbGiuJRVgbnyJrd5NRp2aQMNi"
OTHER = "12D3KooWQ5umrHEFtvyEWhAVqtXvFAmtMpDzGVkeVWVDLVoKyNKq"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))

roles = st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True).filter(lambda role: role != "any")
peer_ids = st.text(
    "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=8, max_size=128
)
u64s = st.integers(0, MAX_U64)


def certificate(key: Ed25519PrivateKey = KEY, **changes: Any) -> Certificate:
    values: dict[str, Any] = {
        "peer_id": PEER,
        "role": WORKER,
        "serial": 7,
        "not_before": 1000,
        "not_after": 2000,
    }
    return Certificate.sign(key, **{**values, **changes})


TOKEN = JoinToken.sign(KEY, role=WORKER, serial=9, not_after=5000, max_uses=3)
REVOCATIONS = RevocationList.sign(KEY, version=4, peer_ids=[OTHER], serials=[1, 2])

FORMS: list[tuple[bytes, Callable[[bytes, bytes], object]]] = [
    (certificate().data, Certificate.decode),
    (TOKEN.data, JoinToken.decode),
    (REVOCATIONS.data, RevocationList.decode),
]
forms = pytest.mark.parametrize(
    ("data", "decode"), FORMS, ids=["certificate", "join_token", "revocations"]
)


@BRIEF
@given(
    peer_id=peer_ids,
    role=roles,
    serial=u64s,
    not_before=st.integers(0, MAX_TIME - 1),
    lifetime=st.integers(1, MAX_TIME),
)
def test_a_certificate_says_what_was_signed(
    peer_id: str, role: str, serial: int, not_before: int, lifetime: int
) -> None:
    not_after = min(not_before + lifetime, MAX_TIME)
    made = certificate(
        peer_id=peer_id, role=role, serial=serial, not_before=not_before, not_after=not_after
    )
    assert Certificate.decode(made.data, PUBLIC_KEY) == made
    assert made.cluster_id == cluster_id_of(PUBLIC_KEY)
    assert (made.peer_id, made.role, made.serial) == (peer_id, role, serial)
    assert (made.not_before, made.not_after) == (not_before, not_after)


@BRIEF
@given(role=roles, serial=u64s, not_after=st.integers(0, MAX_TIME), uses=st.integers(0, 4096))
def test_a_token_says_what_was_signed(role: str, serial: int, not_after: int, uses: int) -> None:
    made = JoinToken.sign(KEY, role=role, serial=serial, not_after=not_after, max_uses=uses)
    assert JoinToken.decode(made.data, PUBLIC_KEY) == made
    assert (made.role, made.serial, made.not_after, made.max_uses) == (
        role,
        serial,
        not_after,
        uses,
    )


@BRIEF
@given(version=st.integers(1, MAX_U64), peers=st.sets(peer_ids, max_size=9), serials=st.sets(u64s))
def test_a_list_says_what_was_signed(version: int, peers: set[str], serials: set[int]) -> None:
    made = RevocationList.sign(KEY, version=version, peer_ids=peers, serials=serials)
    assert RevocationList.decode(made.data, PUBLIC_KEY) == made
    assert (made.version, made.peer_ids, made.serials) == (version, peers, serials)


@forms
def test_any_bit_that_is_flipped_is_refused(
    data: bytes, decode: Callable[[bytes, bytes], object]
) -> None:
    decode(data, PUBLIC_KEY)
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RefusedError):
            decode(bytes(altered), PUBLIC_KEY)


@forms
def test_what_is_cut_or_longer_is_refused(
    data: bytes, decode: Callable[[bytes, bytes], object]
) -> None:
    for cut in range(len(data)):
        with pytest.raises(RefusedError):
            decode(data[:cut], PUBLIC_KEY)
    with pytest.raises(RefusedError):
        decode(data + b"\0", PUBLIC_KEY)


@forms
def test_one_kind_is_not_another(data: bytes, decode: Callable[[bytes, bytes], object]) -> None:
    for other, _ in FORMS:
        if other != data:
            with pytest.raises(RefusedError):
                decode(other, PUBLIC_KEY)


@forms
def test_another_key_is_refused(data: bytes, decode: Callable[[bytes, bytes], object]) -> None:
    with pytest.raises(RefusedError):
        decode(data, STRANGER.public_key().public_bytes_raw())
    with pytest.raises(RefusedError):
        decode(data, b"no key")


@pytest.mark.parametrize(
    "decode",
    [Certificate.decode, JoinToken.decode, RevocationList.decode],
    ids=lambda d: d.__qualname__,
)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(decode: Callable[[bytes, bytes], object], data: bytes) -> None:
    with pytest.raises(RefusedError):
        decode(data, PUBLIC_KEY)


@pytest.mark.parametrize("payload", [Credentials, Verdict], ids=lambda payload: payload.__name__)
@given(data=st.binary(max_size=300))
def test_arbitrary_messages_raise_ours_alone(
    payload: type[Credentials | Verdict], data: bytes
) -> None:
    try:
        payload.decode(data)
    except RemoteProtocolError:
        pass
    else:
        assert len(data) > 1


@BRIEF
@given(
    certificate=st.binary(max_size=1024),
    token=st.binary(max_size=512),
    revocations=st.binary(max_size=2000),
    issuer=st.booleans(),
    asks=st.booleans(),
)
def test_credentials_say_what_was_encoded(
    certificate: bytes, token: bytes, revocations: bytes, issuer: bool, asks: bool
) -> None:
    made = Credentials(certificate, token, revocations, issuer, asks)
    assert Credentials.decode(made.encode()) == made


@BRIEF
@given(reason=st.integers(0, 0xFFFF), text=st.text(max_size=400), issued=st.binary(max_size=1024))
def test_verdicts_say_what_was_encoded(reason: int, text: str, issued: bytes) -> None:
    read = Verdict.decode(Verdict(reason, text, issued).encode())
    assert (read.reason, read.issued) == (reason, issued)
    assert len(read.text) == min(len(text), 256)
    assert read.text.isprintable()


def test_too_much_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        Credentials(certificate=bytes(1025)).encode()
    with pytest.raises(ConfigurationError, match="more than 512"):
        RevocationList.sign(KEY, version=1, peer_ids=[], serials=range(MAX_REVOKED + 1))


def test_the_longest_list_can_be_read() -> None:
    peers = [f"{PEER[:-4]}{a}{b}11" for a in PEER[:26] for b in "abcdefghijkmnopqrstuvwxyz"]
    longest = RevocationList.sign(
        KEY, version=MAX_U64, peer_ids=sorted(set(peers))[:MAX_REVOKED], serials=[]
    )
    message = Credentials(certificate().data, TOKEN.data, longest.data).encode()
    shown = Credentials.decode(message)
    assert RevocationList.decode(shown.revocations, PUBLIC_KEY) == longest


@pytest.mark.parametrize(
    "changes",
    [
        {"peer_id": "no peer"},
        {"peer_id": ""},
        {"role": "any"},
        {"role": "Worker"},
        {"role": ""},
        {"not_before": 2000},
        {"not_after": 2**40},
        {"serial": 2**64 - 1, "not_before": -1},
    ],
)
def test_what_nobody_would_read_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        certificate(**changes)
    assert caught.value.reason == Refusal.CERTIFICATE_INVALID


def test_a_certificate_of_another_cluster_names_both() -> None:
    theirs = certificate(STRANGER)
    with pytest.raises(RefusedError) as caught:
        Certificate.decode(theirs.data, PUBLIC_KEY)
    assert caught.value.reason == Refusal.WRONG_CLUSTER
    assert theirs.cluster_id in str(caught.value)
    assert cluster_id_of(PUBLIC_KEY) in str(caught.value)


def test_the_name_that_a_stranger_gives_its_cluster_is_safe_to_print() -> None:
    forged = CERTIFICATE.sign(STRANGER, "x\n\x1b[2Jadmitted", PEER, "worker", 1, 1000, 2000)
    with pytest.raises(RefusedError) as caught:
        Certificate.decode(forged, PUBLIC_KEY)
    assert caught.value.reason == Refusal.WRONG_CLUSTER
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (699, Refusal.NOT_YET_VALID),
        (700, None),
        (1500, None),
        (2299, None),
        (2300, Refusal.EXPIRED),
        (2.0**60, Refusal.EXPIRED),
    ],
)
def test_clocks_may_differ_by_the_allowance(now: float, reason: Refusal | None) -> None:
    if reason is None:
        certificate().check(PEER, now=now, clock_skew=300)
        return
    with pytest.raises(RefusedError) as caught:
        certificate().check(PEER, now=now, clock_skew=300)
    assert caught.value.reason == reason


def test_a_certificate_is_of_one_peer() -> None:
    with pytest.raises(RefusedError) as caught:
        certificate().check(OTHER, now=1500, clock_skew=0)
    assert caught.value.reason == Refusal.WRONG_PEER


def test_peers_and_serials_are_revoked() -> None:
    REVOCATIONS.check(certificate())
    for revoked in (certificate(peer_id=OTHER), certificate(serial=2)):
        with pytest.raises(RefusedError) as caught:
            REVOCATIONS.check(revoked)
        assert caught.value.reason == Refusal.REVOKED
    RevocationList().check(certificate(peer_id=OTHER))


def test_roles_are_an_open_set_of_a_closed_form() -> None:
    assert all(map(is_role, [WORKER, COORDINATOR, "relay", "data-service-2"]))
    assert not any(map(is_role, ["", "any", "Worker", "2nd", "a b", "x" * 33, "worker\n"]))
    assert is_peer_id(PEER)
    assert not any(map(is_peer_id, ["", "short", PEER + "\n", "0" * 20, PEER * 3]))
