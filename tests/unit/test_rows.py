"""Rows of different sessions and lengths in one forward pass give what each gives alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from stage_families import FAMILIES, Checkpoint, shared

from neurogrid.model.stages.stage import Row

# Relative to the largest logit: matrices of several rows are multiplied in another order.
TOLERANCE = 1e-4


class Batch:
    """Sessions over one checkpoint in stages, each beside a twin that runs alone, over all layers at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        num_layers = checkpoint.num_layers
        self.ranges = [(0, 1), (1, 3), (3, num_layers)]
        self.stages = [checkpoint.shared_stage(*each) for each in self.ranges]
        self.alone = checkpoint.shared_stage(0, num_layers)
        self.ends = checkpoint.shared_ends
        self.vocab_size = checkpoint.vocab_size
        self.worst = 0.0

    def open(self, seed: int) -> Session:
        return Session(self, seed)

    def decode(self, sessions: Sequence[Session]) -> None:
        """One token of each, together; compared with the twins."""
        positions = [s.position for s in sessions]
        embedded = self.ends.embed_rows([s.next_token() for s in sessions], positions=positions)
        hidden = list(embedded.chunk(len(sessions)))
        for i, (stage, (start, stop)) in enumerate(zip(self.stages, self.ranges, strict=True)):
            rows = [Row(h, s.position, s.caches[i]) for h, s in zip(hidden, sessions, strict=True)]
            hidden = stage.forward_rows(rows, start=start, stop=stop)
        together = self.ends.logits_rows(torch.cat(hidden), positions=positions)
        for session, logits in zip(sessions, together, strict=True):
            expected = session.solo([session.next_token()])
            off = float((logits - expected).abs().max() / expected.abs().max())
            self.worst = max(self.worst, off)
            session.tokens.append(int(logits.argmax()))
            assert logits.argmax() == expected.argmax()


class Session:
    def __init__(self, batch: Batch, seed: int) -> None:
        self.batch, self.ends = batch, batch.ends
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, batch.vocab_size, (60,), generator=generator).tolist()
        self.caches = [stage.new_cache() for stage in batch.stages]
        self.twin = batch.alone.new_cache()
        self.position = 0

    def next_token(self) -> int:
        return self.tokens[self.position]

    def prefill(self, num_tokens: int) -> Session:
        """In both worlds alone."""
        token_ids = self.tokens[self.position : self.position + num_tokens]
        hidden = self.ends.embed(token_ids, position=self.position)
        batch = self.batch
        for stage, cache, (start, stop) in zip(
            batch.stages, self.caches, batch.ranges, strict=True
        ):
            hidden = stage.forward(
                hidden, start=start, stop=stop, position=self.position, cache=cache
            )
        mine = self.ends.logits(hidden, position=self.position)
        expected = self.solo(token_ids)
        assert torch.allclose(mine, expected, atol=TOLERANCE * float(expected.abs().max()))
        return self

    def solo(self, token_ids: list[int]) -> torch.Tensor:
        hidden, position = self.ends.embed(token_ids, position=self.position), self.position
        hidden = self.batch.alone.forward(
            hidden, start=0, stop=self.batch.alone.num_layers, position=position, cache=self.twin
        )
        self.position += len(token_ids)
        return self.ends.logits(hidden, position=position)


@pytest.fixture
def llama() -> Checkpoint:
    return shared("llama")


# Dynamic rope is scaled by the longest row: not for rows of different lengths.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama-dynamic"])
def test_rows_that_come_and_go_equal_solo_runs(family: str) -> None:
    batch = Batch(shared(family))
    # Shorter than the window of 8, crossing it, far beyond it and past the rope's 16.
    sessions = [batch.open(seed).prefill(n) for seed, n in enumerate([1, 5, 14, 22])]
    batch.decode(sessions[:3])
    batch.decode(sessions)
    batch.decode([sessions[2], sessions[0]])
    sessions[1].prefill(4)  # a chunk between two steps: it leaves the batch and comes back
    sessions[3].prefill(1)
    del sessions[0]
    sessions.append(batch.open(9).prefill(3))
    for _ in range(2):
        batch.decode(sessions[::-1])
    assert batch.worst <= TOLERANCE


def test_rows_of_a_scaled_rope_are_on_the_same_side_of_its_length() -> None:
    batch = Batch(shared("phi3-longrope"))
    below = [batch.open(seed).prefill(n) for seed, n in enumerate([3, 12])]
    above = [batch.open(seed).prefill(n) for seed, n in enumerate([16, 25], start=2)]
    for _ in range(4):
        batch.decode(below)
        batch.decode(above)
    assert batch.worst <= TOLERANCE


def test_one_row_alone_has_the_bits_of_the_whole_model(llama: Checkpoint) -> None:
    batch = Batch(llama)
    sizes = [4, 1, 1, 1]
    session = batch.open(1)
    session.prefill(4)
    batch.decode([session, batch.open(2).prefill(3)])
    before = batch.worst
    # Alone again. What the batch left in its cache may differ by rounding, so a fresh one counts.
    fresh = batch.open(3)
    token_ids = fresh.tokens[: sum(sizes)]
    expected = llama.whole_logits(token_ids, sizes)
    got = [fresh.solo(token_ids[:4])]
    for token_id in token_ids[4:]:
        hidden = batch.ends.embed([token_id], position=fresh.position)
        row = Row(hidden, fresh.position, fresh.twin)
        (hidden,) = batch.alone.forward_rows([row], start=0, stop=llama.num_layers)
        got.append(batch.ends.logits(hidden, position=fresh.position))
        fresh.position += 1
    assert before <= TOLERANCE
    assert all(torch.equal(mine, its) for mine, its in zip(got, expected, strict=True))


def test_hundreds_of_rows_come_and_go_in_bounded_storage(llama: Checkpoint) -> None:
    batch = Batch(llama)
    sessions = [batch.open(seed).prefill(1 + seed % 30) for seed in range(40)]
    batch.decode(sessions)
    full = sessions[0].caches[0].num_bytes
    del sessions[3:]
    batch.decode(sessions)
    batch.decode([sessions[0], sessions[2]])
    batch.decode([sessions[0], sessions[2]])  # the second time these rows are moved together
    assert 0 < sessions[0].caches[0].num_bytes <= full
    assert batch.worst <= TOLERANCE
    stage = batch.stages[0]
    assert len(stage.pools) == 1
    sessions.clear()
    gc.collect()
    assert len(stage.pools) == 0


def test_a_failed_forward_of_rows_changes_no_session(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(llama)
    sessions = [batch.open(seed).prefill(3 + seed) for seed in range(3)]
    batch.decode(sessions)
    stage = batch.stages[2]
    rows = [Row(torch.randn(1, 1, 48), s.position, s.caches[2]) for s in sessions]
    with monkeypatch.context() as patch:
        patch.setattr(stage.layer(3).mlp, "forward", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            stage.forward_rows(rows, start=3, stop=4)
    batch.decode(sessions)
    sessions[0].prefill(1)
    assert batch.worst <= TOLERANCE


def _out_of_memory(*args: object) -> None:
    raise RuntimeError("out of memory")


def test_nan_in_one_row_stays_there(llama: Checkpoint) -> None:
    stage = llama.shared_stage(0, 2)
    caches = [stage.new_cache() for _ in range(3)]
    for cache in caches:
        stage.forward(torch.randn(1, 3, 48), start=0, stop=2, position=0, cache=cache)
    hidden = [torch.randn(1, 1, 48) for _ in caches]
    hidden[1] = hidden[1] * float("nan")
    rows = [Row(h, 3, cache) for h, cache in zip(hidden, caches, strict=True)]
    first, second, third = stage.forward_rows(rows, start=0, stop=2)
    assert second.isnan().all()
    assert first.isfinite().all()
    assert third.isfinite().all()
    # Nor does it stay in the slot for the next one that gets it.
    del caches[1], rows, cache, second
    other = stage.new_cache()
    stage.forward(torch.randn(1, 2, 48), start=0, stop=2, position=0, cache=other)
    rows = [Row(hidden[0], 4, caches[0]), Row(hidden[0], 2, other)]
    assert all(each.isfinite().all() for each in stage.forward_rows(rows, start=0, stop=2))


def test_bad_rows_are_refused_and_change_nothing(llama: Checkpoint) -> None:
    stage = llama.shared_stage(0, 2)
    good, other = stage.new_cache(), stage.new_cache()
    for cache in (good, other):
        stage.forward(torch.randn(1, 3, 48), start=0, stop=2, position=0, cache=cache)
    hidden = torch.randn(1, 1, 48)
    fine = Row(hidden, 3, good)
    for bad in (
        Row(hidden, 4, other),
        Row(hidden, 0, stage.new_cache()),
        Row(torch.randn(1, 2, 48), 3, other),
        Row(torch.randn(1, 1, 47), 3, other),
        fine,
    ):
        with pytest.raises(ValueError, match=r"."):
            stage.forward_rows([fine, bad], start=0, stop=2)
    with pytest.raises(ValueError, match="not held"):
        stage.forward_rows([fine, Row(hidden, 3, other)], start=0, stop=3)
    assert (good.length, other.length) == (3, 3)
