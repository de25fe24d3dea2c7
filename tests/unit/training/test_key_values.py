"""What rank 0 keeps for the others: as torch's own store does it, and within bounds."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RemoteProtocolError, RequestRefusedError
from neurogrid.training.distributed import key_values
from neurogrid.training.distributed.key_values import KeyValues
from neurogrid.training.wire import MAX_VALUE_BYTES, StoreAnswer, StoreQuestion

keys = st.sampled_from(["a", "b", "c"])
numbers = st.integers(-5, 2**40)
texts = st.text("xyz", max_size=3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), keys, texts),
            st.tuples(st.just("append"), keys, texts),
            st.tuples(st.just("compare_set"), keys, texts, texts),
            st.tuples(st.just("delete_key"), keys),
            st.tuples(st.just("check"), keys),
            st.tuples(st.just("get"), keys),
            st.tuples(st.just("num_keys")),
        ),
        max_size=30,
    )
)
def test_it_does_what_the_store_of_torch_does(actions: list[tuple[str, ...]]) -> None:
    ours, theirs = KeyValues(), dist.HashStore()
    for action, *rest in actions:
        named, values = tuple(rest[:1]), tuple(value.encode() for value in rest[1:])
        if action == "get" and not ours.has(named):
            continue  # torch would wait
        answer = ours.answer(StoreQuestion(action, named, values))
        method = getattr(theirs, action)
        wanted = method([*named]) if action == "check" else method(*rest)
        if action in ("check", "delete_key"):
            assert answer == (b"1" if wanted else b"0")
        elif action == "num_keys":
            assert answer == str(wanted).encode()
        elif action in ("get", "compare_set"):
            assert answer == wanted


@given(st.lists(numbers, min_size=1, max_size=5))
def test_numbers_are_added(added: list[int]) -> None:
    kept, theirs = KeyValues(), dist.HashStore()
    for number in added:
        answer = kept.answer(StoreQuestion("add", ("n",), (str(number).encode(),)))
        assert int(answer) == theirs.add("n", number)
    assert kept.answer(StoreQuestion("get", ("n",))) == theirs.get("n")


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (StoreQuestion("set", ("a",)), "set with 1 keys and 0 values"),
        (StoreQuestion("get", ("a", "b")), "get with 2 keys"),
        (StoreQuestion("num_keys", ("a",)), "num_keys with 1 keys"),
        (StoreQuestion("add", ("a",), (b"much",)), "b'much' is no number"),
        (StoreQuestion("add", ("a",), (b"1" * 21,)), "is no number"),
    ],
)
def test_what_makes_no_sense_is_refused(question: StoreQuestion, said: str) -> None:
    with pytest.raises(RequestRefusedError, match=said):
        KeyValues().answer(question)


def test_it_takes_no_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_values, "MAX_BYTES", 100)
    kept = KeyValues()
    kept.answer(StoreQuestion("set", ("a",), (bytes(90),)))
    with pytest.raises(RequestRefusedError, match="the store is full"):
        kept.answer(StoreQuestion("append", ("a",), (bytes(10),)))
    kept.answer(StoreQuestion("set", ("a",), (bytes(10),)))
    kept.answer(StoreQuestion("set", ("b",), (bytes(80),)))
    kept.answer(StoreQuestion("delete_key", ("b",)))
    kept.answer(StoreQuestion("set", ("c",), (bytes(80),)))
    assert kept.answer(StoreQuestion("delete_key", ("b" * 50,))) == b"0"
    with pytest.raises(RequestRefusedError, match="the store is full"):
        kept.answer(StoreQuestion("set", ("d",), (bytes(20),)))  # nothing was freed


def test_keys_that_are_there_have_new_values_where_no_more_keys_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_values, "MAX_KEYS", 2)
    kept = KeyValues()
    for key in ("a", "b"):
        kept.answer(StoreQuestion("add", (key,), (b"1",)))
    with pytest.raises(RequestRefusedError, match="the store is full"):
        kept.answer(StoreQuestion("add", ("c",), (b"1",)))
    assert kept.answer(StoreQuestion("add", ("b",), (b"1",))) == b"2"


def test_a_value_grows_no_larger_than_an_answer_can_bring() -> None:
    kept = KeyValues()
    kept.answer(StoreQuestion("set", ("a",), (bytes(MAX_VALUE_BYTES),)))
    with pytest.raises(RequestRefusedError, match="at most"):
        kept.answer(StoreQuestion("append", ("a",), (b"1",)))


def test_questions_and_answers_are_read_as_they_were_written() -> None:
    question = StoreQuestion("compare_set", ("key",), (b"\x00", b"\xff"), 2.5)
    assert StoreQuestion.decode(question.encode()) == question
    assert StoreQuestion.decode(StoreQuestion("check", ("key",)).encode()).wait == 0.0
    assert StoreAnswer.decode(StoreAnswer((b"7",)).encode()) == StoreAnswer((b"7",))
    with pytest.raises(LocalProtocolError, match="unknown action 'drop'"):
        StoreQuestion("drop").encode()
    with pytest.raises(RemoteProtocolError):
        StoreQuestion.decode(b"\x80")
