"""The vectors of checks: NeuroGrid reads and draws what they say; and so does a reader written from the specification.

The second one knows nothing of the code: it holds the vectors to the text.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.checks import (
    Claim,
    Conflict,
    Samples,
    Settings,
    Sums,
    apart,
    draw_audits,
    draw_measures,
    open_claim,
    open_evidence,
    open_finding,
)
from tests.unit.vectors import VECTORS, in_turn

PREFIX = b"neurogrid/checks/1/"
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def part(*names: str, result: str | None = None) -> Any:
    return in_turn(
        "checks", where=lambda case: case["part"] in names and result in (None, case["result"])
    )


# NeuroGrid


def claim_fields(claim: Claim) -> dict[str, Any]:
    return {
        "run": claim.run.hex(), "seat": claim.seat, "incarnation": str(claim.incarnation), "number": str(claim.number),
        "round": str(claim.round), "weights": claim.weights.hex(), "settings": claim.settings.hex(),
        "samples": claim.samples.hex(), "before": claim.before.hex(), "kept": claim.kept.hex(),
        "sent": claim.sent.hex(), "result": claim.result.hex(),
    }  # fmt: skip


def read(case: Any) -> dict[str, Any]:
    data = bytes.fromhex(case["hex"])
    if case["part"] == "claim":
        return claim_fields(open_claim(data, case["peer"]))
    if case["part"] == "finding":
        finding = open_finding(data, case["peer"])
        return {
            "claim": finding.claim.hex(),
            "kept": finding.kept.hex(),
            "sent": finding.sent.hex(),
            "result": finding.result.hex(),
            "off": finding.excess,
        }
    evidence = open_evidence(data)
    shows = {Conflict.TWICE: "twice", Conflict.CHAIN: "chain", None: "result"}[evidence.conflict]
    return {
        "kind": int(evidence.kind),
        "accused": evidence.accused,
        "accuser": evidence.accuser,
        "shows": shows,
    }


@part("claim", "finding", "evidence", result="valid")
def test_what_is_valid_is_read(name: str, case: Any) -> None:
    assert read(case) == case["said"]


@part("claim", "finding", "evidence", result="invalid")
def test_what_is_not_is_refused(name: str, case: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read(case)
    assert caught.value.code == ErrorCode[case["error"]]


@part("claim", result="valid")
def test_the_digest_of_a_claim(name: str, case: Any) -> None:
    claim = open_claim(bytes.fromhex(case["hex"]), case["peer"])
    assert claim.digest().hex() == case["claim_digest"]


@part("samples")
def test_the_digest_of_samples(name: str, case: Any) -> None:
    ranges = tuple((slice_, start, stop) for slice_, start, stop in case["ranges"])
    found = Samples(ranges, int(case["step"]), int(case["seed_number"])).digest()
    assert found.hex() == case["digest"]


@part("settings")
def test_the_digest_of_settings(name: str, case: Any) -> None:
    said = dict(case["settings"])
    lr = said.pop("lr")
    said["shapes"] = tuple(map(tuple, said["shapes"]))
    assert Settings(**said).digest(lr).hex() == case["digest"]


@part("draw")
def test_draws(name: str, case: Any) -> None:
    found = draw_audits(
        bytes.fromhex(case["seed"]), case["claimed"], case["auditors"], float(case["share"]), copies=case["copies"],
        watched=case.get("watched", ()),
    )  # fmt: skip
    assert [[audit.seat, audit.auditor] for audit in found] == case["audits"]


@part("measure")
def test_measures(name: str, case: Any) -> None:
    seats = case["claimed"], case["auditors"]
    found = draw_measures(bytes.fromhex(case["seed"]), *seats, float(case["share"]))
    assert [[each.seat, each.auditor] for each in found] == case["audits"]


@part("distance")
def test_distances(name: str, case: Any) -> None:
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(case["a"], case["b"], strict=True)]
    sums = [
        Sums(
            sum(x * x for x, _ in pair), sum(y * y for _, y in pair), sum((x - y) ** 2 for x, y in pair), len(pair)
        )
        for pair in pairs
    ]  # fmt: skip
    found = apart(sums, case["floor"])
    said = case["distance"]
    assert found.angle == pytest.approx(said["angle"], abs=1e-6)
    assert found.log_ratio == pytest.approx(said["ratio"], abs=1e-6)
    assert found.tensor_angle == pytest.approx(said["tensor_angle"], abs=1e-6)
    assert found.tensor_log_ratio == pytest.approx(said["tensor_ratio"], abs=1e-6)


# A reader written from the specification


class Refused(Exception):
    """With the name of the error."""


def key_of(peer: str) -> Ed25519PublicKey:
    number = 0
    for character in peer:
        number = 58 * number + ALPHABET.index(character)
    encoded = number.to_bytes(38, "big")
    assert encoded[:6] == b"\x00\x24\x08\x01\x12\x20"
    return Ed25519PublicKey.from_public_bytes(encoded[6:])


def opened(kind: str, data: bytes, peer: str) -> bytes:
    if len(data) != {"claim": 333, "finding": 201}[kind]:
        raise Refused("PROTOCOL_VIOLATION")
    body = data[64:]
    try:
        key_of(peer).verify(data[:64], PREFIX + kind.encode() + b"\0" + body)
    except (InvalidSignature, AssertionError, ValueError, OverflowError) as exc:
        raise Refused("UNAUTHORIZED") from exc
    if body[0] != 1:
        raise Refused("PROTOCOL_VIOLATION")
    return body


def number_at(body: bytes, at: int, size: int) -> int:
    return int.from_bytes(body[at : at + size], "little")


def their_claim(data: bytes, peer: str) -> tuple[dict[str, Any], str]:
    body = opened("claim", data, peer)
    numbers = {"incarnation": 21, "number": 29, "round": 37}
    digests = {
        "weights": 45,
        "settings": 77,
        "samples": 109,
        "before": 141,
        "kept": 173,
        "sent": 205,
        "result": 237,
    }
    found: dict[str, Any] = {"run": body[1:17].hex(), "seat": number_at(body, 17, 4)}
    for name, at in numbers.items():
        if not number_at(body, at, 8):
            raise Refused("PROTOCOL_VIOLATION")
        found[name] = str(number_at(body, at, 8))
    found |= {name: body[at : at + 32].hex() for name, at in digests.items()}
    return found, hashlib.sha256(PREFIX + b"claim digest\0" + body).hexdigest()


def their_finding(data: bytes, peer: str) -> dict[str, Any]:
    body = opened("finding", data, peer)
    (off,) = struct.unpack("<d", body[129:])
    if not 0 <= off <= 1e9:
        raise Refused("PROTOCOL_VIOLATION")
    places = {"claim": 1, "kept": 33, "sent": 65, "result": 97}
    return {**{name: body[at : at + 32].hex() for name, at in places.items()}, "off": off}


def their_evidence(data: bytes) -> dict[str, Any]:
    def check(holds: bool) -> None:
        if not holds:
            raise Refused("PROTOCOL_VIOLATION")

    check(len(data) > 3 and data[0] == 1 and data[1] in (1, 2))
    names, at = [], 2
    for _ in range(2):
        check(at < len(data) and data[at] <= 128)
        names.append(data[at + 1 : at + 1 + data[at]])
        check(len(names[-1]) == data[at])
        at += 1 + data[at]
    accused, accuser = (name.decode("ascii") for name in names)
    said = {"kind": data[1], "accused": accused, "accuser": accuser}
    first, second = data[at : at + 333], data[at + 333 :]
    if data[1] == 1:
        check(not accuser)
        (one, _), (other, _) = their_claim(first, accused), their_claim(second, accused)
        return said | {"shows": shown(one, other)}
    finding = their_finding(second, accuser)
    _, digest = their_claim(first, accused)
    check(finding["claim"] == digest and finding["off"] > 2 and accuser != accused)
    return said | {"shows": "result"}


def shown(one: dict[str, Any], other: dict[str, Any]) -> str:
    if one != other and all(one[name] == other[name] for name in ("run", "seat", "incarnation")):
        if one["round"] == other["round"] or one["number"] == other["number"]:
            return "twice"
        earlier, later = sorted((one, other), key=lambda claim: int(claim["number"]))
        follows = int(later["number"]) == int(earlier["number"]) + 1
        if follows and later["before"] not in (earlier["kept"], earlier["sent"]):
            return "chain"
    raise Refused("PROTOCOL_VIOLATION")


@part("claim", "finding", "evidence")
def test_another_reader_comes_to_the_same(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    found: dict[str, Any] = {}
    error = None
    try:
        if case["part"] == "claim":
            found, digest = their_claim(data, case["peer"])
            assert digest == case["claim_digest"]
        elif case["part"] == "finding":
            found = their_finding(data, case["peer"])
        else:
            found = their_evidence(data)
    except Refused as exc:
        error = str(exc)
    assert (error, found) == (case.get("error"), case.get("said", {}))


def hashed(salt: str, seed: bytes, *seats: int) -> int:
    packed = b"".join(seat.to_bytes(4, "little") for seat in seats)
    whole = hashlib.sha256(PREFIX + b"draw\0" + salt.encode() + b"\0" + seed + packed).digest()
    return int.from_bytes(whole[:8], "little")


@part("draw")
def test_another_program_draws_the_same(name: str, case: Any) -> None:
    seed = bytes.fromhex(case["seed"])
    due = Fraction(case["share"]) * len(case["claimed"])
    number = math.floor(due)
    number += hashed("share", seed) < (due - number) * 2**64
    order = sorted((hashed("claim", seed, seat), seat) for seat in case["claimed"])
    waits, chosen = [each for each in case.get("watched", ()) if each in case["claimed"]], []
    for place in range(min(number, len(order))):
        rest = [seat for _, seat in order if seat not in chosen]
        is_odd = waits and hashed("watched", seed, place) < 2**63
        chosen.append(waits[0] if is_odd else rest[0])
        waits = [each for each in waits if each not in chosen]
    given = dict.fromkeys(case["auditors"], 0)
    audits: list[list[int]] = []
    for seat in chosen:
        others = sorted(
            (given[auditor], hashed("auditor", seed, seat, auditor), auditor)
            for auditor in given
            if auditor != seat
        )
        for _load, _hash, auditor in others[: case["copies"]]:
            given[auditor] += 1
            audits.append([seat, auditor])
    assert audits == case["audits"]


@part("measure")
def test_another_program_draws_the_same_measures(name: str, case: Any) -> None:
    seed = bytes.fromhex(case["seed"])
    own = hashlib.sha256(PREFIX + b"measure\0" + seed).digest()
    given, measures = dict.fromkeys(case["auditors"], 0), []
    is_measured = hashed("worth", seed) < Fraction(case["share"]) * 2**64
    for _, seat in sorted((hashed("claim", own, each), each) for each in case["claimed"]):
        others = [each for each in given if each != seat]
        if is_measured and others:
            chosen = min(others, key=lambda each: (given[each], hashed("auditor", own, seat, each)))
            given[chosen] += 1
            measures.append([seat, chosen])
    assert measures == case["audits"]


@part("samples", "settings")
def test_another_program_hashes_the_same(name: str, case: Any) -> None:
    if case["part"] == "samples":
        packed = int(case["step"]).to_bytes(8, "little") + int(case["seed_number"]).to_bytes(
            8, "little"
        )
        packed += len(case["ranges"]).to_bytes(4, "little")
        packed += b"".join(each.to_bytes(4, "little") for one in case["ranges"] for each in one)
    else:
        said = case["settings"]
        packed = struct.pack("<IIdd", said["top_k"], said["max_side"], said["decay"], said["lr"])
        packed += bytes((said["is_one_bit"],)) + len(said["shapes"]).to_bytes(4, "little")
        for shape in said["shapes"]:
            packed += len(shape).to_bytes(4, "little")
            packed += b"".join(each.to_bytes(8, "little") for each in shape)
    digest = hashlib.sha256(PREFIX + case["part"].encode() + b"\0" + packed).hexdigest()
    assert digest == case["digest"]


@part("distance")
def test_the_distances_are_those_of_plain_vectors(name: str, case: Any) -> None:
    """By the cosine, which is less exact for small angles, of vectors with one more element."""

    def between(x: list[float], y: list[float]) -> tuple[float, float]:
        more = case["floor"] * math.sqrt(len(x))
        x, y = [*x, more], [*y, more]
        lengths = math.hypot(*x), math.hypot(*y)
        cosine = sum(a * b for a, b in zip(x, y, strict=True)) / math.prod(lengths)
        return math.acos(max(-1.0, min(1.0, cosine))), abs(math.log(lengths[0] / lengths[1]))

    tensors = [between(x, y) for x, y in zip(case["a"], case["b"], strict=True)]
    whole = between([*chain(*case["a"])], [*chain(*case["b"])])
    said = case["distance"]
    assert whole == pytest.approx((said["angle"], said["ratio"]), abs=1e-5)
    assert max(t[0] for t in tensors) == pytest.approx(said["tensor_angle"], abs=1e-5)
    assert max(t[1] for t in tensors) == pytest.approx(said["tensor_ratio"], abs=1e-5)


def test_the_file_has_no_number_that_is_none() -> None:
    """JSON has neither NaN nor infinity."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    json.loads((VECTORS / "checks.json").read_text(encoding="utf-8"), parse_constant=refuse)
