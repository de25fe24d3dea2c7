"""The posts of a channel: whatever the two ends do first, everything arrives, and nobody holds more than a window."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.distributed.chunks import CHUNK_BYTES, chunks_of, parts_of
from neurogrid.training.distributed.posts import (
    WINDOW_BYTES,
    IncomingPosts,
    OutgoingPosts,
    cost_of,
)

# Transfers by their bytes: empty ones, small ones, and some of several windows.
transfers = st.lists(
    st.one_of(st.just(0), st.integers(1, 10_000), st.integers(1, 3 * WINDOW_BYTES)), max_size=60
)


@given(transfers, st.randoms(use_true_random=False))
def test_everything_arrives_whoever_is_first(sizes: list[int], random: Random) -> None:
    outgoing, incoming = OutgoingPosts(), IncomingPosts()
    posts: list[int] = []  # bytes, by number
    unsent: list[int] = []
    on_the_way: list[int] = []
    notices: list[int] = []
    to_send, to_expect = list(sizes), list(sizes)
    expected = 0
    while to_send or to_expect or unsent or on_the_way or notices:
        steps = []
        if to_send:
            steps.append("send")
        if to_expect:
            steps.append("expect")
        if notices:
            steps.append("notice")
        if on_the_way:
            steps.append("arrive")
        if unsent and outgoing.may_send(unsent[0], posts[unsent[0]]):
            steps.append("write")
        assert steps, "both wait for each other"
        step = random.choice(steps)
        if step == "send":
            chunks = [end - start for start, end in chunks_of(0, to_send.pop(0))]
            first = outgoing.reserve(len(chunks))
            assert first == len(posts)
            posts += chunks
            unsent += range(first, len(posts))
        elif step == "expect":
            chunks = [end - start for start, end in chunks_of(0, to_expect.pop(0))]
            first, notice = incoming.reserve(chunks)
            assert first == expected
            expected += len(chunks)
            if notice is not None:
                notices.append(notice)
        elif step == "notice":
            outgoing.grant(notices.pop(random.randrange(len(notices))))
        elif step == "write":
            outgoing.sent(unsent[0], posts[unsent[0]])
            on_the_way.append(unsent.pop(0))
        else:
            number = on_the_way.pop(random.randrange(len(on_the_way)))
            incoming.arrive(number, bytes(posts[number]))
            assert incoming.early_cost <= WINDOW_BYTES
    for number, size in enumerate(posts):
        data = incoming.take(number)
        assert data is not None
        assert len(data) == size
    assert incoming.early_cost == 0


def test_a_receiver_that_is_not_there_is_sent_a_window() -> None:
    outgoing = OutgoingPosts()
    first = outgoing.reserve(2000)
    sent = 0
    while outgoing.may_send(first + sent, 0):
        outgoing.sent(first + sent, 0)
        sent += 1
    assert sent * cost_of(0) == WINDOW_BYTES
    outgoing.grant(first + 1)
    assert outgoing.may_send(first + sent, 0)


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_post_that_comes_twice_is_refused(is_expected: bool) -> None:
    incoming = IncomingPosts()
    if is_expected:
        incoming.reserve([3])
    incoming.arrive(0, b"abc")
    with pytest.raises(RemoteProtocolError, match="post 0 came twice"):
        incoming.arrive(0, b"abc")


def test_a_post_that_was_taken_is_not_taken_again() -> None:
    incoming = IncomingPosts()
    incoming.reserve([3])
    incoming.arrive(0, b"abc")
    assert incoming.take(0) == b"abc"
    assert incoming.take(0) is None
    with pytest.raises(RemoteProtocolError, match="came twice"):
        incoming.arrive(0, b"abc")


def test_a_post_of_another_size_is_refused_early_or_late() -> None:
    incoming = IncomingPosts()
    incoming.reserve([3])
    with pytest.raises(RemoteProtocolError, match="post 0 has 4 B where 3 B belong"):
        incoming.arrive(0, b"abcd")
    early = IncomingPosts()
    early.arrive(0, b"abcd")
    with pytest.raises(RemoteProtocolError, match="post 0 has 4 B where 3 B belong"):
        early.reserve([3])


def test_no_more_comes_unasked_than_a_window() -> None:
    incoming = IncomingPosts()
    for number in range(WINDOW_BYTES // CHUNK_BYTES):
        incoming.arrive(number, bytes(CHUNK_BYTES))
    with pytest.raises(RemoteProtocolError, match="more than the"):
        incoming.arrive(77, b"")
    incoming.reserve([CHUNK_BYTES])
    incoming.arrive(77, b"")


@given(st.integers(0, 10 * CHUNK_BYTES), st.integers(0, 5 * CHUNK_BYTES))
def test_chunks_cover_their_bytes(start: int, num_bytes: int) -> None:
    chunks = chunks_of(start, start + num_bytes)
    assert chunks[0][0] == start
    assert chunks[-1][1] == start + num_bytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(chunks))
    assert all(end - begin <= CHUNK_BYTES for begin, end in chunks)
    assert num_bytes == 0 or all(end > begin for begin, end in chunks)


@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40))
def test_parts_differ_by_one_item_at_most(num_items: int, item_bytes: int, num_parts: int) -> None:
    parts = parts_of(num_items, item_bytes, num_parts)
    assert len(parts) == num_parts
    assert parts[0][0] == 0
    assert parts[-1][1] == num_items * item_bytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
    lengths = {end - begin for begin, end in parts}
    assert max(lengths) - min(lengths) <= item_bytes
    assert all(length % item_bytes == 0 for length in lengths)
