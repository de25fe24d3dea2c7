"""The vectors of protocol_spec/training/witnessed.md: the code has them, and so has what is written from it alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from neurogrid.training.witnessed import (
    BloomFilter,
    Commitment,
    EpochRules,
    EpochState,
    MerklePath,
    Parts,
    ResultPlan,
    WitnessProof,
    event_json,
    event_of,
    merkle_path,
    merkle_root,
    order,
    parts_of,
    quorum,
    tick,
)
from tests.unit.training import witnessed_by_the_book as book
from tests.unit.vectors import in_turn, subject

FILE = "witnessed"


def of_kind(*kinds: str, valid: bool = True) -> Any:
    return in_turn(FILE, where=lambda c: c["kind"] in kinds and ("output" in c) == valid)


def binary(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


@of_kind("order")
def test_seats_have_the_order_of_the_vector(name: str, case: Any) -> None:
    given = case["input"]
    seed = bytes.fromhex(given["seed"])
    assert list(order(seed, given["salt"], given["seats"])) == case["output"]["order"]
    assert book.order(seed, given["salt"], given["seats"]) == case["output"]["order"]


def parts_as_vector(parts: Parts) -> dict[str, Any]:
    return {
        "trainers": list(parts.trainers),
        "auditors": list(parts.auditors),
        "witnesses": list(parts.witnesses),
        "works": [[seat, *work] for seat, work in parts.works.items()],
        "quorum": parts.quorum,
    }


@of_kind("parts")
def test_who_does_what_is_as_the_vector_says(name: str, case: Any) -> None:
    given = case["input"]
    seed = bytes.fromhex(given["seed"])
    roles = {key: given[key] for key in ("auditors", "witnesses")}
    batches = {key: given[key] for key in ("first_batch", "num_batches")}
    rules = EpochRules(1, 128, 1, 1, 1.0, 1.0, 1.0, 1.0, **roles)
    state = EpochState(seed=seed, seats=tuple(given["seats"]), **batches)
    assert parts_as_vector(parts_of(rules, state)) == case["output"]
    found = book.parts(seed, given["seats"], *roles.values(), *batches.values(), [])
    works = [[seat, *work] for seat, work in found["works"].items()]
    assert {**found, "works": works} == case["output"]


@of_kind("quorum")
def test_quorums_are_those_of_the_vector(name: str, case: Any) -> None:
    for function in (quorum, book.quorum):
        assert [function(n) for n in case["input"]["witnesses"]] == case["output"]["quorums"]


@of_kind("filter")
def test_a_filter_has_the_bits_of_the_vector(name: str, case: Any) -> None:
    salt, items = bytes.fromhex(case["input"]["salt"]), binary(case["input"]["items"])
    made = BloomFilter.of(salt, items)
    assert bytes(made).hex() == case["output"]["filter"]
    assert all(item in made for item in items)
    assert book.filter_of(salt, items).hex() == case["output"]["filter"]


@of_kind("has")
def test_a_filter_has_what_the_vector_says(name: str, case: Any) -> None:
    salt, data, item = binary([case["input"][key] for key in ("salt", "filter", "item")])
    assert (item in BloomFilter(salt, data)) == case["output"]["has"]
    assert book.has(data, salt, item) == case["output"]["has"]


@of_kind("tree")
def test_a_tree_has_the_root_of_the_vector(name: str, case: Any) -> None:
    digests = binary(case["input"]["digests"])
    assert merkle_root(digests).hex() == case["output"]["root"]
    assert book.root(digests).hex() == case["output"]["root"]


@of_kind("path")
def test_a_path_is_that_of_the_vector(name: str, case: Any) -> None:
    digests, digest = binary(case["input"]["digests"]), bytes.fromhex(case["input"]["digest"])
    expected = case["output"]
    path = MerklePath(expected["place"], expected["num_leaves"], tuple(binary(expected["digests"])))
    assert merkle_path(digests, digest) == path
    assert path.shows(bytes.fromhex(expected["root"]), digest)
    assert book.path(digests, digest) == list(path.digests)


@of_kind("commitment")
def test_a_commitment_has_the_digest_of_the_vector(name: str, case: Any) -> None:
    written, run = case["input"]["commitment"], bytes.fromhex(case["input"]["run"])
    commitment = Commitment.read(written)
    assert commitment.json() == written
    assert commitment.digest().hex() == case["output"]["digest"]
    assert commitment.signed_bytes(run).hex() == case["output"]["signed"]
    assert book.commitment_digest(written).hex() == case["output"]["digest"]
    assert book.signed(run, commitment.digest()).hex() == case["output"]["signed"]


@of_kind("proof")
def test_a_proof_is_that_of_the_vector(name: str, case: Any) -> None:
    given, run = case["input"], bytes.fromhex(case["input"]["run"])
    place = given["seat"], bytes.fromhex(given["seed"]), given["epoch"], given["round"]
    proof = WitnessProof.of(*place, map(Commitment.read, given["commitments"]))
    assert proof.json() == case["output"]["proof"]
    assert WitnessProof.read(proof.json()) == proof
    assert proof.digest().hex() == case["output"]["digest"]
    assert proof.signed_bytes(run).hex() == case["output"]["signed"]
    assert book.proof_of(*place, given["commitments"]) == case["output"]["proof"]
    assert book.proof_digest(proof.json()).hex() == case["output"]["digest"]


def plan_of(given: Any) -> ResultPlan:
    tensors = tuple((chunks, size) for chunks, size in given["tensors"])
    return ResultPlan(tensors, given["top_k"], given["one_bit"])


@of_kind("result")
def test_a_result_has_the_bytes_of_the_vector(name: str, case: Any) -> None:
    plan, data = plan_of(case["input"]), bytes.fromhex(case["output"]["result"])
    values = np.frombuffer(bytes.fromhex(case["input"]["values"]), "<f4")
    positions = np.array(case["input"]["positions"])
    assert plan.encode(positions, values) == data
    assert plan.num_bytes == len(data)
    found, numbers = plan.decode(data)
    assert found.tolist() == positions.tolist()
    assert numbers.tobytes() == values.tobytes()
    assert (found.dtype, numbers.dtype) == (np.int64, np.float32)


@of_kind("result", valid=False)
def test_a_result_is_refused_as_the_vector_says(name: str, case: Any) -> None:
    with pytest.raises(ValueError, match=case["error"]):
        plan_of(case["input"]).decode(bytes.fromhex(case["input"]["result"]))


@of_kind("fold")
def test_a_journal_folds_to_the_states_of_the_vector(name: str, case: Any) -> None:
    rules = EpochRules(**case["input"]["rules"])
    state, other = EpochState(), book.Book(case["input"]["rules"])
    for each, (phase, digest) in zip(case["input"]["ticks"], case["output"]["states"], strict=True):
        draw, events = bytes.fromhex(each["draw"]), [event_of(event) for event in each["events"]]
        assert [event_json(event) for event in events] == each["events"]
        state = tick(rules, state, each["time"], events, draw=draw)
        assert (state.phase, state.digest().hex()) == (phase, digest)
        other.tick(each["time"], each["events"], draw)
        assert book.state_digest(other.state).hex() == digest
    assert state.json() == case["output"]["last"]
    assert EpochState.read(case["output"]["last"]) == state


def test_all_arrows_stand_in_a_vector() -> None:
    seen = set()
    for case in subject(FILE)["cases"]:
        if case["kind"] != "fold":
            continue
        phases = ["waiting_for_members", *(phase for phase, _ in case["output"]["states"])]
        seen |= {pair for pair in pairwise(phases) if pair[0] != pair[1]}
    assert {
        ("waiting_for_members", "warmup"),
        ("warmup", "round_train"),
        ("round_train", "round_witness"),
        ("round_witness", "round_train"),
        ("round_witness", "cooldown"),
        ("cooldown", "waiting_for_members"),
        ("cooldown", "finished"),
        ("warmup", "paused"),
        ("round_train", "paused"),
        ("paused", "round_train"),
    } <= seen
