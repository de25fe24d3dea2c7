"""The text of an answer: stop strings wherever tokens begin and end, and nothing of them seen before they are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.inference.generation.sampling import GeneratedToken, Logprobs
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.server.openai.answer_writer import AnswerWriter, Piece, held_back

TOKENIZER = Tokenizer.open(embedded_model_path())
LENGTH = "length"


def written(text: str, stop: list[str], *, logprobs: bool = False) -> list[Piece]:
    """What comes of the tokens of `text`, one at a time; the last says that there is no place for more."""
    ids = TOKENIZER.encode(text)[1:]
    writer = AnswerWriter(TOKENIZER, [0], stop)
    pieces = []
    for number, token_id in enumerate(ids, 1):
        told = Logprobs(-1.0, ((token_id, -1.0),)) if logprobs else None
        reason = LENGTH if number == len(ids) else None
        pieces.append(writer.push(GeneratedToken(token_id, told, reason)))
        if pieces[-1].finish_reason:
            break
    assert writer.num_tokens == len(pieces)
    return pieces


def cut(text: str, stop: list[str]) -> str:
    """The text of the first tokens that make a stop string whole, before the first such string in it."""
    stream, so_far = TOKENIZER.stream(), ""
    for token_id in TOKENIZER.encode(text)[1:]:
        so_far += stream.push(token_id)
        if found := [so_far.find(s) for s in stop if s in so_far]:
            return so_far[: min(found)]
    return text


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab \n", min_size=1, max_size=30),
    stop=st.lists(st.text("ab \n", min_size=1, max_size=4), min_size=1, max_size=4),
    min_tokens=st.integers(1, 20),
)
def test_no_stop_string_counts_before_the_least_number_of_tokens(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """The first that ends in a later token's text does, wherever it begins in what was not given out."""
    ids = TOKENIZER.encode(text)[1:]
    writer = AnswerWriter(TOKENIZER, [0], stop, min_tokens=min_tokens)
    stream, whole, given_out, num_unstopped = TOKENIZER.stream(), "", "", 0
    for number, token_id in enumerate(ids, 1):
        whole += stream.push(token_id)
        piece = writer.push(GeneratedToken(token_id))
        given_out += piece.text
        if number <= min_tokens:
            num_unstopped = len(whole)
            assert piece.finish_reason is None
            continue
        ends = [
            at
            for s in stop
            for at in range(len(whole))
            if whole.startswith(s, at) and at + len(s) > num_unstopped
        ]
        if ends:
            assert piece.finish_reason == "stop"
            assert given_out == whole[: min(ends)]
            return
        assert piece.finish_reason is None
        assert whole.startswith(given_out)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abé😀 \n", min_size=1, max_size=40),
    stop=st.lists(st.text("abé😀 \n", min_size=1, max_size=6), max_size=4),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    expected = cut(text, stop)
    pieces = written(text, stop)
    so_far = ""
    for piece in pieces:
        so_far += piece.text
        assert expected.startswith(so_far)
    assert so_far == expected
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == ("stop" if any(s in text for s in stop) else LENGTH)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1), max_size=4))
def test_held_back_is_no_more_than_what_could_begin_one(text: str, stop: list[str]) -> None:
    num_held = held_back(text, stop)
    lengths = [
        length
        for length in range(1, len(text) + 1)
        if any(len(s) > length and s.startswith(text[-length:]) for s in stop)
    ]
    assert num_held == max(lengths, default=0)


def test_tokens_come_with_their_text() -> None:
    text = "A function definition is an executable statement."
    pieces = written(text, [" executable statements"], logprobs=True)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(token.text for token in tokens) == text
    assert all(text[token.offset :].startswith(token.text) for token in tokens)
    # Held back together with what could have been the stop string.
    for piece in pieces:
        assert piece.text == "".join(token.text for token in piece.tokens)


def test_tokens_of_a_stop_string_are_not_told() -> None:
    text = "A function definition is an executable statement."
    pieces = written(text, [" an exec"], logprobs=True)
    tokens = [token.text for piece in pieces for token in piece.tokens]
    assert "".join(tokens) == "A function definition is"


def test_an_end_of_sequence_token_is_no_text() -> None:
    writer = AnswerWriter(TOKENIZER, [0])
    (token_id,) = TOKENIZER.encode(" class")[1:]
    writer.push(GeneratedToken(token_id))
    # Whatever its id: here one that would be text.
    assert writer.push(GeneratedToken(token_id, None, "stop")) == Piece("", (), "stop")
    assert writer.num_tokens == 2


def test_half_a_character_at_the_end_is_told_as_that() -> None:
    first, *_ = TOKENIZER.encode("😀")[1:]
    writer = AnswerWriter(TOKENIZER, [0])
    assert writer.push(GeneratedToken(first, None, LENGTH)).text == "\N{REPLACEMENT CHARACTER}"


def test_what_is_impossible_has_a_finite_logarithm() -> None:
    writer = AnswerWriter(TOKENIZER, [0])
    piece = writer.push(GeneratedToken(5, Logprobs(-float("inf"), ((6, -0.5),)), LENGTH))
    assert piece.tokens[0].logprob == pytest.approx(-9999.0)
