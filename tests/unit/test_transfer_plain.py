"""The rules of a blob that comes without an offer: each chunk once, in any order, agreeing with the others."""

from __future__ import annotations

import mmap
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer import PlainBlob
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    ErrorCode,
    WeightsChunk,
    blob_id,
    iter_weights_chunks,
    num_chunks,
)

LAYER = 5
TAIL = 1000
BLOB = Random(1).randbytes(2 * CHUNK_BYTES + TAIL)
FIRST, SECOND, THIRD = iter_weights_chunks(BLOB)


def id_of(blob: bytes) -> bytes:
    return blob_id(blake3(chunk.data).digest() for chunk in iter_weights_chunks(blob))


def plain(total_chunks: int = 3) -> PlainBlob:
    return PlainBlob(layer_id=LAYER, total_chunks=total_chunks, now=100.0)


def refuse(incoming: PlainBlob, chunk: WeightsChunk, says: str) -> None:
    before = incoming.num_received, incoming.last_progress
    with pytest.raises(RequestRefusedError, match=says) as caught:
        incoming.add(chunk, now=200.0)
    assert caught.value.code == ErrorCode.TRANSFER_INVALID
    assert f"layer {LAYER}" in str(caught.value)
    assert (incoming.num_received, incoming.last_progress) == before


@given(order=st.permutations([FIRST, SECOND, THIRD]), again=st.lists(st.integers(0, 2), max_size=4))
@settings(max_examples=20, deadline=None)
def test_chunks_in_any_order_and_some_twice_give_the_blob(
    order: list[WeightsChunk], again: list[int]
) -> None:
    incoming = plain()
    for number, chunk in enumerate(order):
        assert not incoming.is_complete
        incoming.add(chunk, now=100.0)
        for index in again:
            incoming.add(order[index % (number + 1)], now=100.0)
        assert incoming.num_received == number + 1
    assert incoming.is_complete
    view, content_id = incoming.finish()
    assert bytes(view) == BLOB
    assert content_id == id_of(BLOB)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_blob_of_any_size(size: int) -> None:
    blob = bytes(size)
    incoming = plain(num_chunks(size))
    for chunk in iter_weights_chunks(blob):
        incoming.add(chunk, now=100.0)
    assert incoming.is_complete
    view, content_id = incoming.finish()
    assert bytes(view) == blob
    assert content_id == id_of(blob)


def test_progress_is_a_chunk_that_was_not_there() -> None:
    incoming = plain()
    assert incoming.last_progress == 100.0
    incoming.add(SECOND, now=101.0)
    incoming.add(SECOND, now=102.0)
    assert incoming.last_progress == 101.0
    incoming.add(FIRST, now=103.0)
    assert incoming.last_progress == 103.0


def test_a_total_that_changes() -> None:
    incoming = plain()
    incoming.add(FIRST, now=100.0)
    refuse(incoming, WeightsChunk(1, 4, SECOND.data), "the total changed from 3 to 4")
    refuse(incoming, WeightsChunk(1, 2, SECOND.data), "the total changed from 3 to 2")


def test_an_index_out_of_range() -> None:
    refuse(plain(), WeightsChunk(3, 3, b""), "chunk 3 of 3 is out of range")


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1])
def test_a_chunk_before_the_last_that_is_short(length: int) -> None:
    says = f"chunk 0 has {length} B instead of {CHUNK_BYTES}"
    refuse(plain(), WeightsChunk(0, 3, bytes(length)), says)


@pytest.mark.parametrize("index", [0, 2])
def test_a_chunk_twice_with_other_bytes(index: int) -> None:
    incoming = plain()
    chunk = (FIRST, SECOND, THIRD)[index]
    incoming.add(chunk, now=100.0)
    lie = bytearray(chunk.data)
    lie[-1] ^= 1
    says = f"chunk {index} came twice with different bytes"
    refuse(incoming, WeightsChunk(index, 3, bytes(lie)), says)


def test_a_last_chunk_twice_with_another_length() -> None:
    incoming = plain()
    incoming.add(THIRD, now=100.0)
    refuse(incoming, WeightsChunk(2, 3, bytes(THIRD.data)[:-1]), f"{TAIL - 1} B instead of {TAIL}")


def test_what_was_announced_is_known_before_any_memory_is_taken() -> None:
    assert plain(MAX_CHUNKS).min_bytes == (MAX_CHUNKS - 1) * CHUNK_BYTES


def test_no_memory_is_an_error_that_the_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("neurogrid.p2p.transfer.memory_store.mmap.mmap", full)
    with pytest.raises(RequestRefusedError, match="no memory for the 3 MiB of layer 5") as caught:
        plain().add(FIRST, now=100.0)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY
