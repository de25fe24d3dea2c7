"""What a run file comes to with its data: what of it is written into the journal can be read again."""

from __future__ import annotations

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.opening import rules_of
from neurogrid.training.runs.entries import BeganEntry, entry_of
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_file import parse_run_file

MANIFEST = Manifest("text", (SliceInfo(bytes(32), 8, 264),), sequence_length=8, vocab_size=500)


def rules(stop: str, batch_tokens: int) -> Rules:
    run = parse_run_file(
        f'[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\n{stop}\n[outer]\nmethod = "diloco"\n'
        f"every = 100\n[inner]\nbatch_tokens = {batch_tokens}\n[members]\nmax = 4\n"
    )
    return rules_of(run, MANIFEST)


@pytest.mark.parametrize(
    "stop", ["rounds = 1_000_000_000_000_000", "steps = 1_000_000_000_000_000"]
)
def test_a_run_of_more_samples_than_a_journal_counts_is_refused(stop: str) -> None:
    """As an end that is not to come, beside hours: it would begin, and its journal could not be read again."""
    with pytest.raises(ConfigurationError, match=rf"^\[stop\] {stop[:5]}s? comes to more samples"):
        rules(f"hours = 9\n{stop}", 1_000_000)


@pytest.mark.parametrize(
    "stop", ["rounds = 1_000_000_000_000", "steps = 1_000_000_000_000_000", "tokens = 8_000"]
)
def test_the_samples_of_a_run_are_read_again(stop: str) -> None:
    entry = BeganEntry(4, rules(stop, 8_000).num_samples(4))
    assert entry_of(entry.json()) == entry


def test_the_first_end_is_what_counts() -> None:
    assert rules("rounds = 1_000_000_000_000_000\ntokens = 8_000", 1_000_000).max_samples == 1000
