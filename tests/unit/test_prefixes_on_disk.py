"""What sessions had, on disk: found again by the same tokens alone, verified before it is believed, and bounded."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_families import shared
from test_coded_caches import feed

from neurogrid.inference.generation.stored_prefixes import (
    MIN_STORED,
    StoredPrefix,
    StoredPrefixes,
    prefix_name,
)
from neurogrid.model.caches.cache import LayerStates
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.worker.prefixes import PrefixIdentity, WorkerPrefixes

LENGTH = 20
IDENTITY = PrefixIdentity(
    name=prefix_name([1, 2, 3]),
    owner="12D3KooW",
    start=0,
    stop=2,
    layers=(b"a" * 32, b"b" * 32),
    form="F32 ",
    adapter=b"",
)


def states(seed: int = 0) -> dict[int, LayerStates]:
    generator = torch.Generator().manual_seed(seed)
    return {
        layer_id: (
            torch.randn(1, 2, LENGTH, 8, generator=generator),
            torch.randn(1, 2, LENGTH, 12, generator=generator),
        )
        for layer_id in range(2)
    }


def prefixes(path: Path, max_bytes: int = 1 << 20) -> WorkerPrefixes:
    return WorkerPrefixes(CacheSettings(path), max_bytes)


def is_there(kept: WorkerPrefixes, identity: PrefixIdentity = IDENTITY, seed: int = 0) -> bool:
    loaded = kept.load(identity)
    if loaded is None:
        return False
    found, length = loaded
    assert length == LENGTH
    for layer_id, pair in states(seed).items():
        for got, expected in zip(found[layer_id], pair, strict=True):
            assert torch.equal(got, expected)
    return True


def file_of(path: Path) -> Path:
    (found,) = (path / "prefixes").glob("*.blob")
    return found


def test_it_comes_back_after_a_restart_and_to_nobody_else(tmp_path: Path) -> None:
    assert prefixes(tmp_path).store(IDENTITY, states(), LENGTH)
    kept = prefixes(tmp_path)
    assert is_there(kept)
    for other in (
        {"name": prefix_name([1, 2, 4])},
        {"owner": "12D3KooX"},
        {"start": 1},
        {"layers": (b"a" * 32, b"c" * 32)},
        {"form": "F32 I8"},
        {"adapter": b"d" * 64},
    ):
        assert kept.load(replace(IDENTITY, **other)) is None
    assert oct((tmp_path / "prefixes").stat().st_mode)[-3:] == "700"


def test_coded_states_and_those_that_lie_apart_come_back(tmp_path: Path) -> None:
    room = torch.randint(-100, 100, (1, 2, 2 * LENGTH, 10), dtype=torch.int8)
    half = torch.randn(1, 2, LENGTH, 6).to(torch.bfloat16)
    given = {0: (room[:, :, :LENGTH], room[:, :, LENGTH:]), 1: (half, half + 1)}
    kept = prefixes(tmp_path)
    assert kept.store(IDENTITY, given, LENGTH)
    loaded = kept.load(IDENTITY)
    assert loaded is not None
    for layer_id, pair in given.items():
        for got, expected in zip(loaded[0][layer_id], pair, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_broken_file_is_refused_and_removed(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept = prefixes(tmp_path)
    assert kept.store(IDENTITY, states(), LENGTH)
    path = file_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert kept.load(IDENTITY) is None
    assert not path.exists()
    assert "is damaged" in caplog.text
    assert kept.store(IDENTITY, states(), LENGTH)
    assert is_there(kept)


def test_a_torn_file_is_refused_and_removed(tmp_path: Path) -> None:
    kept = prefixes(tmp_path)
    assert kept.store(IDENTITY, states(), LENGTH)
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    assert kept.load(IDENTITY) is None
    assert not path.exists()


def test_a_note_that_leads_to_another_prefix_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it would be if somebody had renamed it."""
    other = replace(IDENTITY, name=prefix_name([9]))
    kept = prefixes(tmp_path)
    assert kept.store(other, states(), LENGTH)
    notes = tmp_path / "prefix-names"
    (note,) = notes.iterdir()
    (notes / f"{IDENTITY.key.hex()}.json").write_bytes(note.read_bytes())
    assert kept.load(IDENTITY) is None
    assert "is not what its name says" in caplog.text
    assert not list((tmp_path / "prefixes").glob("*.blob"))
    for nonsense in (b"", b"zz", b"00", os.urandom(64)):
        (notes / f"{IDENTITY.key.hex()}.json").write_bytes(nonsense)
        assert kept.load(IDENTITY) is None


def test_the_longest_unused_goes_first_and_what_is_too_large_is_not_kept(tmp_path: Path) -> None:
    kept = prefixes(tmp_path)
    assert kept.store(IDENTITY, states(), LENGTH)
    size = file_of(tmp_path).stat().st_size + 4096
    kept = prefixes(tmp_path, 2 * size)
    second, third = (replace(IDENTITY, name=prefix_name([number])) for number in (2, 3))
    assert kept.store(second, states(2), LENGTH)
    for path in (tmp_path / "prefixes", tmp_path / "prefix-names"):
        for file in path.iterdir():
            os.utime(file, (time.time() - 100,) * 2)
    assert is_there(kept)  # used just now
    assert kept.store(third, states(3), LENGTH)
    assert is_there(kept)
    assert is_there(kept, third, 3)
    assert kept.load(second) is None
    assert not prefixes(tmp_path / "small", 100).store(IDENTITY, states(), LENGTH)


def test_without_a_limit_or_a_directory_there_are_none(tmp_path: Path) -> None:
    for kept in (WorkerPrefixes(None, 1000), WorkerPrefixes(CacheSettings(tmp_path), None)):
        assert not kept.is_kept
        assert not kept.store(IDENTITY, states(), LENGTH)
        assert kept.load(IDENTITY) is None


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("is_coded", [False, True])
def test_a_restored_cache_goes_on_as_the_one_that_was_stored(
    tmp_path: Path, family: str, is_coded: bool
) -> None:
    checkpoint = shared(family)
    stage = checkpoint.stage(0, checkpoint.num_layers)
    stage.codes_caches = is_coded
    hidden_BTD = torch.randn(1, LENGTH + 3, stage.hidden_size)
    cache = stage.new_cache()
    feed(stage, cache, hidden_BTD, [LENGTH])
    kept = prefixes(tmp_path, 1 << 22)
    layers = tuple(bytes([i]) * 32 for i in range(stage.num_layers))
    identity = replace(IDENTITY, stop=stage.num_layers, layers=layers)
    assert kept.store(identity, cache.states(), LENGTH)
    loaded = kept.load(identity)
    assert loaded is not None
    restored = stage.new_cache()
    restored.restore(loaded[0], 0, stage.num_layers, loaded[1])
    assert restored.length == LENGTH
    more = hidden_BTD[:, LENGTH:]
    expected = feed(stage, cache, more, [1, 2], position=LENGTH)
    assert torch.equal(feed(stage, restored, more, [1, 2], position=LENGTH), expected)
    with pytest.raises(ValueError, match="keeps"):
        stage.new_cache().restore(loaded[0], 0, stage.num_layers, LENGTH - 15)
    stage.codes_caches = not is_coded
    with pytest.raises(ValueError, match="keeps"):
        stage.new_cache().restore(loaded[0], 0, stage.num_layers, LENGTH)


class Chosen:
    """A selection, as far as the index looks at it."""

    has_same_bits = True

    class _Stage:
        def __init__(self, peer_id: str) -> None:
            self.peer_id = peer_id
            self.stage = range(4)

    def __init__(self, peer_id: str = "a") -> None:
        self.stages = (self._Stage(peer_id),)


STAGES = (("a", 0, 4),)


def test_the_longest_that_is_shared_is_found_on_the_same_workers() -> None:
    tokens = list(range(1000))
    index = StoredPrefixes(shortest_cut=lambda length: 0, replays=True)
    short, long = (
        StoredPrefix(tuple(tokens[:length]), (length,), b"", STAGES) for length in (300, 600)
    )
    assert index.lacks(short)
    index.add(short)
    index.add(long)
    selection: object = Chosen()
    assert index.best(tokens[:500], b"", selection) == (long, 499)  # type: ignore[arg-type]
    assert index.best(tokens[:300], b"", selection) == (short, 299)  # type: ignore[arg-type]
    assert index.best(tokens, b"", selection) == (long, 600)  # type: ignore[arg-type]
    assert index.best(tokens, b"x", selection) is None  # type: ignore[arg-type]
    assert index.best(tokens, b"", Chosen("b")) is None  # type: ignore[arg-type]
    assert index.best(tokens[: MIN_STORED // 2], b"", selection) is None  # type: ignore[arg-type]
    assert not index.lacks(short)
    assert not index.lacks(replace(short, tokens=short.tokens[: MIN_STORED - 1]))
    assert index.lacks(replace(short, adapter=b"x"))
    index.forget(long)
    assert index.best(tokens, b"", selection) == (short, 300)  # type: ignore[arg-type]


def test_what_cannot_be_cut_is_gone_on_from_its_end_alone() -> None:
    tokens = list(range(1000))
    index = StoredPrefixes(shortest_cut=lambda length: length, replays=False)
    prefix = StoredPrefix(tuple(tokens[:600]), (600,), b"", STAGES)
    index.add(prefix)
    selection: object = Chosen()
    assert index.best(tokens[:500], b"", selection) is None  # type: ignore[arg-type]
    assert index.best(tokens[:700], b"", selection) == (prefix, 600)  # type: ignore[arg-type]
    assert index.lacks(replace(prefix, tokens=prefix.tokens[:300]))


class Watched(tuple[int, ...]):
    """Tokens that count in which ways they are looked at: each of them, and how many at once."""

    looks = elements = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Watched.looks += 1
        Watched.elements += len(found) if isinstance(at, slice) else 1
        return found


def test_of_many_that_begin_alike_few_are_looked_at_whole() -> None:
    """All of an agent's turns begin alike. What looks at them runs where all others wait."""
    shared, num_stored = list(range(8000)), 100
    index = StoredPrefixes(shortest_cut=lambda length: 0, replays=False)
    for number in range(num_stored):
        index.add(StoredPrefix(Watched([*shared, number + 10_000]), (8001,), b"", STAGES))
    Watched.looks = Watched.elements = 0
    assert index.lacks(StoredPrefix((*shared, 9000), (8001,), b"", STAGES))
    assert Watched.elements <= 10 * num_stored
    Watched.looks = Watched.elements = 0
    selection: Any = Chosen()
    found = index.best([*shared, 10_007, 1], b"", selection)
    assert found is not None
    assert found[1] == 8001
    assert Watched.looks <= 1000  # not each token by itself
    assert Watched.elements <= 10 * len(shared)
