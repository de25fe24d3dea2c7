"""Mixtures: each source has the share that its weight says, and nothing that is held out is trained on."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.training.data.dealing import Dealer
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.preparing.mixing import mixed_sizes
from neurogrid.training.data.slices import open_slice, read_manifest, slice_path
from neurogrid.training.runs.run_directory import read_run_file

ROOT = Path(__file__).parents[3]

LENGTH = 8


@given(
    sources=st.lists(
        st.tuples(st.integers(1, 10**7), st.integers(1, 1000) | st.floats(0.001, 1000)),
        min_size=2,
        max_size=8,
    ),
    repeat=st.integers(1, 50),
)
def test_counts_are_in_the_proportions_of_the_weights(
    sources: list[tuple[int, float]], repeat: int
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    try:
        counts = mixed_sizes(sizes, weights, repeat)
    except ConfigurationError:
        return  # one of them has no sample
    total, of_all = sum(counts), sum(map(Fraction, weights))
    for count, weight in zip(counts, weights, strict=True):
        # Less than a sample of each is missing.
        assert abs(count - total * Fraction(weight) / of_all) <= len(sources)
    # It ends where one has come as often as it may, or all have come once.
    is_used_up = any(c == repeat * s for c, s in zip(counts, sizes, strict=True))
    has_all = all(c >= s for c, s in zip(counts, sizes, strict=True))
    assert is_used_up or has_all
    assert all(c <= repeat * s for c, s in zip(counts, sizes, strict=True))


@pytest.mark.parametrize(
    ("sizes", "weights", "repeat", "counts"),
    [
        ((300, 100), (3, 1), 1, (300, 100)),
        ((1000, 100), (3, 1), 1, (300, 100)),  # the small one has run out
        ((1000, 100), (3, 1), 2, (600, 200)),
        ((1000, 100), (3, 1), 99, (1000, 333)),  # all of the large one has come
        ((100, 100), (0.5, 0.5), 7, (100, 100)),
    ],
)
def test_an_epoch_ends(
    sizes: tuple[int, ...], weights: tuple[float, ...], repeat: int, counts: tuple[int, ...]
) -> None:
    assert mixed_sizes(sizes, weights, repeat) == counts


def test_a_source_without_a_sample_is_named() -> None:
    with pytest.raises(ConfigurationError, match="source 2 of the mixture would have no sample"):
        mixed_sizes([10, 1000], [1000, 1], 1)


def write_ids(path: Path, first: int, num_samples: int) -> Path:
    """Samples of which each token says the source and the sample."""
    ids = first + np.arange(num_samples).repeat(LENGTH)
    ids.astype("<u4").tofile(path)
    return path


def first_ids(directory: Path, infos: tuple[SliceInfo, ...]) -> list[int]:
    manifest = read_manifest(directory)
    found = [open_slice(slice_path(directory, info), manifest, info)["input_ids"] for info in infos]
    rows = torch.cat(found)
    assert (rows == rows[:, :1]).all()
    ids: list[int] = rows[:, 0].tolist()
    return ids


OPTIONS: dict[str, Any] = {
    "vocab_size": 100_000,
    "sequence_length": LENGTH,
    "token_bytes": 4,
    "slice_samples": 50,
}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """1,000 samples from 0, and 100 from 50,000."""
    return [
        write_ids(tmp_path / "web.bin", 0, 1000),
        write_ids(tmp_path / "code.bin", 50_000, 100),
    ]


def mix(sources: list[Path], out: Path, **how: Any) -> Manifest:
    return prepare(sources, out, weights=(3, 1), **OPTIONS, **how)


def test_what_is_in_a_mixture(tmp_path: Path, sources: list[Path]) -> None:
    told: list[str] = []
    out = tmp_path / "data"
    manifest = mix(sources, out, repeat=2, held_out=0.1, say=told.append, licence="CC0")
    ids = first_ids(out, manifest.slices)
    by_source = Counter(each >= 50_000 for each in ids)
    assert by_source == {False: 540, True: 180}
    times = Counter(ids)
    assert {times[each] for each in times if each < 50_000} == {1}
    assert {times[each] for each in times if each >= 50_000} == {2}
    # The end of each is held out, and stands by itself.
    web, code = manifest.parts
    held = [
        first_ids(out, manifest.held_out[: web.num_held_out]),
        first_ids(out, manifest.held_out[web.num_held_out :]),
    ]
    assert sorted(held[0]) == list(range(900, 1000))
    assert sorted(held[1]) == list(range(50_090, 50_100))
    assert not set(ids) & {*held[0], *held[1]}
    assert (web.name, web.licence, web.num_samples, web.num_distinct) == (
        "web.bin",
        "CC0",
        540,
        540,
    )
    assert (code.name, code.num_samples, code.num_distinct) == ("code.bin", 180, 90)
    assert (web.num_held_out, code.num_held_out) == (2, 1)
    assert told == [
        "web.bin: 540 samples of 720, of 900: the others are left out",
        "code.bin: 180 samples of 720, which are 90, each 2 times",
    ]
    assert read_manifest(out) == manifest
    assert manifest.source == "web.bin, code.bin"


def test_sources_are_shuffled_together(tmp_path: Path, sources: list[Path]) -> None:
    """Each slice has samples of both, about as the weights say; and another seed has others of the large one."""
    out = tmp_path / "data"
    manifest = mix(sources, out, repeat=4, held_out=0)
    assert len(manifest.slices) == 27
    for info in manifest.slices[:-1]:
        ids = first_ids(out, (info,))
        assert 3 <= sum(each >= 50_000 for each in ids) <= 25  # of 50, 12.5 are expected
    again = mix(sources, tmp_path / "again", repeat=4, held_out=0)
    assert again == manifest
    once = mix(sources, tmp_path / "once", held_out=0)
    other = mix(sources, tmp_path / "other", held_out=0, seed=1)
    few = [
        set(first_ids(tmp_path / name, made.slices))
        for name, made in (("once", once), ("other", other))
    ]
    assert len(few[0]) == len(few[1]) == 400
    assert 250 < len(few[0] & few[1]) < 400 or len(few[0] - few[1]) > 50


def test_an_epoch_of_a_mixture_has_each_sample_once(tmp_path: Path, sources: list[Path]) -> None:
    """What is dealt in an epoch is in the proportions of the weights: exactly, whoever takes how much."""
    out = tmp_path / "data"
    manifest = mix(sources, out, repeat=2, held_out=0.1)
    dealer = Dealer(manifest.sizes, seed=5, num_epochs=1)
    dealt: Counter[tuple[int, int]] = Counter()
    turn = 0
    while ranges := dealer.deal(f"member {turn % 3}", 7 + turn % 5):
        turn += 1
        for each in ranges:
            dealt.update((each.slice, number) for number in range(each.start, each.stop))
    assert set(dealt.values()) == {1}
    slices = [first_ids(out, (info,)) for info in manifest.slices]
    ids = [slices[slice_][number] for slice_, number in dealt]
    assert Counter(each >= 50_000 for each in ids) == {False: 540, True: 180}


def test_data_directories_text_and_ids_are_mixed(tmp_path: Path) -> None:
    """A part keeps what it has held out and its licence; text gets the tokenizer of what was prepared."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"document {number} says {number * number} " * 30)
    prepare(
        texts, tmp_path / "old", vocab_size=300, sequence_length=LENGTH, licence="MIT", held_out=0.2
    )
    old = read_manifest(tmp_path / "old")
    (np.arange(8000) % 200).astype("<u2").tofile(tmp_path / "ids.bin")
    manifest = prepare(
        [tmp_path / "old", texts, tmp_path / "ids.bin"],
        tmp_path / "data",
        sequence_length=LENGTH,
        weights=(1, 1, 2),
        held_out=0.1,
        licence="CC0",
    )
    assert [part.licence for part in manifest.parts] == ["MIT", "CC0", "CC0"]
    assert [part.name for part in manifest.parts] == ["old", "texts", "ids.bin"]
    assert (manifest.tokenizer, manifest.vocab_size) == (old.tokenizer, old.vocab_size)
    kept = (tmp_path / "data" / "tokenizer" / "tokenizer.json").read_bytes()
    assert kept == (tmp_path / "old" / "tokenizer" / "tokenizer.json").read_bytes()
    of_old = manifest.held_out[: manifest.parts[0].num_held_out]
    theirs = [
        {
            tuple(row)
            for info in infos
            for row in open_slice(slice_path(place, info), made, info)["input_ids"].tolist()
        }
        for place, made, infos in (
            (tmp_path / "old", old, old.held_out),
            (tmp_path / "data", manifest, of_old),
        )
    ]
    assert theirs[0] == theirs[1]


def test_the_example_is_mixed(tmp_path: Path) -> None:
    """With the tokenizer of the model that it names."""
    run = read_run_file(ROOT / "examples" / "mixture.toml")
    data = run.data
    manifest = prepare(
        [run.place(each) for each in data.places],
        tmp_path / "data",
        tokenizer=embedded_model_path(),
        weights=[part.weight for part in data.mixture],
        repeat=data.repeat,
    )
    docs, examples = manifest.parts
    assert (docs.name, examples.name) == ("docs", "examples")
    assert abs(docs.num_samples - 3 * examples.num_samples) <= 3
    assert examples.num_samples == 2 * examples.num_distinct
    assert docs.num_held_out
    assert examples.num_held_out


def test_sources_that_do_not_go_together_are_refused(tmp_path: Path, sources: list[Path]) -> None:
    def refused(reason: str, places: list[Path], **how: Any) -> None:
        with pytest.raises(ConfigurationError, match=reason):
            prepare(places, tmp_path / "data", **{**OPTIONS, "weights": (3, 1), **how})
        assert not (tmp_path / "data").exists()

    web, code = sources
    refused("a mixture has 2 to 64 sources, not 1", [web], weights=(3,))
    refused("there are 2 sources and 3 weights", sources, weights=(3, 1, 1))
    refused("a weight is above 0", sources, weights=(3, -1))
    refused("a weight is above 0", sources, weights=(3, float("nan")))
    refused("repeat is 1 to 1000, not 0", sources, repeat=0)
    refused("repeat is of a mixture", sources, weights=(), repeat=2)
    refused(r"web\.bin is in the mixture twice: give it the sum", [web, web])
    refused(r"there is no such file", [web, tmp_path / "nowhere"])
    refused("there is no source", [], weights=())
    prepare(code, tmp_path / "short", **{**OPTIONS, "sequence_length": 4})
    refused(
        "web.bin and short do not go together: their sequence_length", [web, tmp_path / "short"]
    )
    refused("short is prepared already: it can be mixed", [tmp_path / "short"], weights=())
    prepare(code, tmp_path / "good", **OPTIONS)
    info = read_manifest(tmp_path / "good").slices[0]
    content = bytearray(slice_path(tmp_path / "good", info).read_bytes())
    content[-4] ^= 1
    slice_path(tmp_path / "good", info).write_bytes(content)
    refused(r"safetensors is not what its name says: it was damaged", [web, tmp_path / "good"])
    slice_path(tmp_path / "good", info).unlink()
    refused(r"good is not whole: ", [web, tmp_path / "good"])


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} and {name * 3} then " * 400)
        prepare(tmp_path / f"{name}.txt", tmp_path / name, vocab_size=262, sequence_length=LENGTH)
    with pytest.raises(ConfigurationError, match="b was prepared with another tokenizer than"):
        prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "data", weights=(1, 1))
    with pytest.raises(ConfigurationError, match="a was prepared with another tokenizer than"):
        prepare(
            [tmp_path / "a", tmp_path / "b.txt"],
            tmp_path / "data",
            weights=(1, 1),
            tokenizer=tmp_path / "b" / "tokenizer",
        )
