"""What a chain takes: numbers against what real stages have, and a cut that is the leader's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from neurogrid.errors import ConfigurationError, UnsupportedModelError
from neurogrid.training.leading.chains.lead import _changed_rules
from neurogrid.training.leading.chains.numbers import chain_numbers, pieces_that_learn
from neurogrid.training.runs.estimate import BASE_BYTES
from neurogrid.training.runs.run_file import InnerSection, OuterSection, RunFile, parse_run_file
from neurogrid.training.runs.run_file.stage_sections import AdapterSection, LayoutSection
from neurogrid.training.stages.chain_estimate import (
    ChainNumbers,
    estimate_chain,
    fitting_micro_batches,
    is_tied,
    rooms_of,
    stage_sizes,
)
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from tests.unit.stage_families import FAMILIES
from tests.unit.training.test_stage_learner import Chain, model_of

BASE = BASE_BYTES // 2
ADAPTER = AdapterSection(r=4, alpha=8.0, targets=("q_proj", "down_proj"))
NUMBERS = ChainNumbers(
    layers=(100, 100, 100, 100),
    adapters=(0, 0, 0, 0),
    ends=250,
    first=120,
    last=130,
    hidden_size=10,
    vocab_size=12,
)
RUN = parse_run_file(
    """
[model]
config = "model/"
[data]
path = "data/"
sequence_length = 8
[inner]
batch_tokens = 64
[layout]
stages = 2
[stop]
tokens = 6_400
"""
)


def with_layout(**values: object) -> RunFile:
    return replace(RUN, layout=replace(RUN.layout, **values))


def config_of(family: str, directory: Path) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(model_of(family).config.to_dict()))
    return file


def num_bytes(tensors: list[Tensor]) -> int:
    """Of memory: what is there in shape only has one element."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.nbytes() > 8)


@pytest.mark.parametrize("family", ["untied", "tied", "mixture"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("adapter", [AdapterSection(), ADAPTER])
def test_what_is_told_is_what_stages_have(
    family: str, num_stages: int, adapter: AdapterSection, tmp_path: Path
) -> None:
    if family == "mixture" and adapter.r:
        adapter = replace(adapter, targets=("q_proj",))
    run = replace(
        RUN,
        adapter=adapter,
        layout=LayoutSection(stages=num_stages),
        inner=replace(RUN.inner, optimizer="adamw"),
    )
    numbers = chain_numbers(config_of(family, tmp_path), adapter)
    told = estimate_chain(run, numbers)
    cuts = [stage.start for stage in told.stages[1:]]
    chain = Chain(family, *cuts, adapter=adapter)
    chain.step(1)
    for stage, real in zip(told.stages, chain.stages, strict=True):
        skeleton = real._stage._skeleton
        modules = (skeleton.model, *(skeleton.layer(n) for n in range(stage.start, stage.stop)))
        weights = [each for m in modules for each in m.parameters() if each.device.type != "meta"]
        assert num_bytes(weights) == stage.weights
        kept = [
            value
            for state in real._optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        ]
        assert sum(each.nbytes for each in kept) == stage.optimizer
    chain.compute(2)
    chain.exchange()
    for stage, real in zip(told.stages, chain.stages, strict=True):
        gradients = [each.grad for each in real._parameters.values() if each.grad is not None]
        assert sum(each.nbytes for each in gradients) == stage.gradients
    learning = sum(p.numel() for s in chain.stages for n, p in s._parameters.items())
    bounds = [0, *cuts, 4]
    for index, real in enumerate(chain.stages):
        assert pieces_that_learn(run, numbers, bounds, index) == real.pieces().keys()
    assert is_tied(run, numbers) == (family == "tied" and not adapter.r)
    assert all(is_tied(run, numbers) == chain.stages[i].is_tied for i in (0, -1) if cuts)
    assert told.num_learning == learning - (numbers.num_tied if cuts and not adapter.r else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_tells_whether_both_ends_have_something(family: str, tmp_path: Path) -> None:
    """As stages find out by their gradients."""
    config = FAMILIES[family]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    numbers = chain_numbers(tmp_path, AdapterSection())
    assert is_tied(RUN, numbers) == bool(config.get_text_config(decoder=True).tie_word_embeddings)


def test_a_chain_is_cut_by_what_its_stages_take() -> None:
    sizes = stage_sizes(RUN, NUMBERS)
    assert sizes == StageSizes(
        layers=(1600,) * 4,
        first=4 * 250 + 12 * 120,
        last=4 * 250 + 12 * 130,
        alone=16 * 250,
    )
    assert sizes.needed(0, 4) == 6400 + 4000
    assert sizes.needed(1, 3) == 3200
    told = estimate_chain(RUN, NUMBERS)
    assert [(s.start, s.stop) for s in told.stages] == [(0, 2), (2, 4)]
    for stage in told.stages:
        held = stage.weights + stage.gradients + stage.optimizer
        assert held == sizes.needed(stage.start, stage.stop)
    adapter = replace(RUN, adapter=ADAPTER)
    numbers = replace(NUMBERS, adapters=(3, 0, 0, 5))
    sizes = stage_sizes(adapter, numbers)
    assert sizes == StageSizes((448, 400, 400, 480), 1000, 1000, 1000, 400, 1000)
    narrow = replace(adapter, inner=replace(RUN.inner, precision="bfloat16"))
    # Two layers lie behind the last cut.
    whole = stage_sizes(RUN, NUMBERS)
    assert stage_sizes(with_layout(subspace=3), NUMBERS) == replace(whole, fewest_last=2)
    with pytest.raises(ConfigurationError, match="subspace is 10, and the model's hidden states"):
        stage_sizes(with_layout(subspace=10), NUMBERS)
    sizes = stage_sizes(narrow, numbers)
    assert sizes == StageSizes((248, 200, 200, 280), 500, 500, 500, 200, 1000)
    # Opened are the ends first, which come in float32, then one layer after the other.
    assert sizes.needed(0, 1) == 500 + 1000
    assert sizes.needed(1, 3) == 400 + 200
    assert sizes.needed(0, 4) == 500 + 928 + 200
    opened = [(s.weights, s.opening) for s in estimate_chain(narrow, numbers).stages]
    assert opened == [(400 + 500 + 4 * 3, 1000 - 400), (400 + 500 + 4 * 5, 1000 - 400)]
    # More learns at one end than at the other.
    uneven = replace(NUMBERS, first=250, last=0)
    assert cut_layers(stage_sizes(RUN, uneven), (0, 0)) == (0, 1, 4)


def test_what_a_step_takes() -> None:
    told = estimate_chain(RUN, NUMBERS)
    # 8 samples of 8 tokens, one a micro-batch; hidden states in bfloat16.
    assert (told.samples, told.micro_batches) == (8, 8)
    assert told.boundary_bytes == 2 * 64 * 10
    assert told.tied_bytes == 0
    assert told.bubble == 1 / 9
    assert told.num_steps == 100
    assert told.state_bytes == 3 * 4 * 650
    assert [stage.under_way for stage in told.stages] == [2, 1]
    a_layer = 68 * 10 * 8
    logits = 3 * 4 * 12 * 8
    assert [s.activations for s in told.stages] == [2 * 2 * a_layer, 2 * a_layer + logits]
    again = estimate_chain(with_layout(recompute=True), NUMBERS)
    assert [s.activations for s in again.stages] == [
        2 * a_layer + 2 * 8 * 8,
        2 * a_layer + logits + 4 * 10 * 8,
    ]
    wide = estimate_chain(with_layout(activations="float32", micro_batches=3), NUMBERS)
    assert (wide.boundary_bytes, wide.micro_batches) == (4 * 64 * 10, 3)
    assert wide.stages[1].activations == 3 * (2 * a_layer + logits)
    assert estimate_chain(with_layout(subspace=3), NUMBERS).boundary_bytes == 2 * 64 * 3
    one = estimate_chain(with_layout(stages=1), NUMBERS)
    assert (one.boundary_bytes, one.bubble, one.stages[0].under_way) == (0, 0.0, 1)
    assert one.stages[0].weights == 4 * 650
    tied = replace(NUMBERS, ends=130, first=120, last=130)
    assert estimate_chain(RUN, tied).tied_bytes == 4 * 120
    assert estimate_chain(replace(RUN, adapter=ADAPTER), tied).tied_bytes == 0
    narrow = replace(RUN, inner=replace(RUN.inner, precision="bfloat16"))
    assert [s.copies for s in estimate_chain(narrow, NUMBERS).stages] == [2 * 2 * 320, 2 * 330]
    sgd = replace(RUN, inner=InnerSection(optimizer="sgd", momentum=0.0, batch_tokens=64))
    assert estimate_chain(sgd, NUMBERS).stages[0].optimizer == 0


def test_how_long_a_step_takes() -> None:
    assert estimate_chain(RUN, NUMBERS, speeds=[2.0]).step_seconds is None
    told = estimate_chain(RUN, NUMBERS, speeds=[2.0, 4.0], bytes_per_second=10.0)
    assert told.compute_seconds == pytest.approx(8 / 4 * 9 / 8)
    assert told.send_seconds == told.step_seconds == 128.0
    tied = replace(NUMBERS, ends=130, first=120, last=130)
    told = estimate_chain(RUN, tied, speeds=[2.0], bytes_per_second=1e6)
    assert told.step_seconds == pytest.approx(2.25 + 480 / 1e6)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not fit into 2 stages: .* take 10,400 bytes"
    ):
        estimate_chain(RUN, NUMBERS, lent=(BASE + 5000, BASE + 5000))
    told = estimate_chain(RUN, NUMBERS, lent=(BASE + 4100, BASE + 10_000))
    assert [(s.start, s.stop) for s in told.stages] == [(0, 1), (1, 4)]
    assert rooms_of([0, 100, BASE + 7]) == [0, 1, 7]


def test_an_adapter_for_nothing_is_refused(tmp_path: Path) -> None:
    file = config_of("untied", tmp_path)
    with pytest.raises(
        ConfigurationError, match="no layer of the model has a linear layer 'c_attn'"
    ):
        chain_numbers(file, replace(ADAPTER, targets=("c_attn",)))
    file.write_text('{"model_type": "bert"}')
    with pytest.raises((ConfigurationError, UnsupportedModelError)):
        chain_numbers(file, AdapterSection())


def test_a_base_in_codes_counts_as_such(tmp_path: Path) -> None:
    """By the config alone, and by weights that are there; those are counted with the headers of their blobs."""
    file = config_of("untied", tmp_path)
    adapter = replace(ADAPTER, quantize="int8")
    by_config = chain_numbers(file, adapter)
    model_of("untied").save_pretrained(tmp_path / "model")
    by_weights = chain_numbers(tmp_path / "model", adapter)
    assert len(by_config.coded) == 4
    for told, there in zip(by_config.coded, by_weights.coded, strict=True):
        assert told < there < told + 8192
    assert sum(by_config.coded) < 0.5 * 4 * sum(by_config.layers)
    assert chain_numbers(tmp_path / "model", ADAPTER).coded == ()
    run = replace(RUN, adapter=adapter)
    sizes = stage_sizes(run, by_config)
    assert sizes.layers[0] == by_config.coded[0] + 4 * 4 * by_config.adapters[0]
    (first, _) = estimate_chain(run, by_config).stages
    adapters = sum(by_config.adapters[:2])
    assert first.weights == sum(by_config.coded[:2]) + 4 * (by_config.ends + adapters)


def test_a_batch_goes_in_as_many_micro_batches_as_leave_room() -> None:
    run = replace(RUN, inner=replace(RUN.inner, batch_tokens=64 * RUN.data.sequence_length))
    bounds, widths = (0, 2, 4), (1, 1)

    def micro_batches(lent: int, **layout: object) -> int:
        changed = replace(run, layout=replace(run.layout, stages=2, **layout))
        return fitting_micro_batches(changed, NUMBERS, bounds, (lent, lent), widths)

    def needed(num: int) -> int:
        changed = replace(run, layout=replace(run.layout, stages=2, micro_batches=num))
        return max(each.memory_bytes for each in estimate_chain(changed, NUMBERS).stages)

    assert micro_batches(0) == 8
    assert needed(8) > needed(16) > needed(32) > needed(64)
    for num in (8, 16, 32, 64):
        assert micro_batches(needed(num)) == num
    # Where none leaves room: one a sample.
    assert micro_batches(1) == 64
    # What a run file says holds.
    assert micro_batches(1, micro_batches=4) == 4
    # Two members of a stage are given half each, and have four for each of three.
    assert (
        fitting_micro_batches(
            replace(run, layout=replace(run.layout, stages=2)), NUMBERS, bounds, (0, 0), (1, 2)
        )
        == 12
    )


def test_a_batch_goes_in_no_more_micro_batches_than_a_step_may_have() -> None:
    """Of many samples, one a micro-batch would be more, and no Step could say so."""
    run = replace(RUN, inner=replace(RUN.inner, batch_tokens=4096 * RUN.data.sequence_length))
    assert fitting_micro_batches(run, NUMBERS, (0, 2, 4), (1, 1), (1, 1)) == 1024


def test_hidden_states_of_a_micro_batch_are_one_message() -> None:
    """256 MiB have three samples of 80 MiB each."""
    run = replace(
        RUN,
        data=replace(RUN.data, sequence_length=2**20),
        inner=replace(RUN.inner, batch_tokens=64 * 2**20),
    )
    wide = replace(NUMBERS, hidden_size=40)

    def cut(numbers: ChainNumbers, **layout: int) -> int:
        changed = replace(run, layout=replace(run.layout, **layout))
        return estimate_chain(changed, numbers).micro_batches

    assert cut(NUMBERS) == 8
    assert cut(wide) == 32
    assert cut(wide, micro_batches=22) == 22
    assert cut(wide, micro_batches=4, stages=1) == 4
    said = "stages send each other .* at once: give more .layout. micro_batches"
    with pytest.raises(ConfigurationError, match=said):
        cut(wide, micro_batches=21)
    with pytest.raises(ConfigurationError, match="of 1 samples has hidden states"):
        cut(replace(NUMBERS, hidden_size=200))


def test_a_change_to_more_than_a_message_has_is_refused() -> None:
    """Stages would fail by it, one after the other, until nobody is asked any more."""
    wide, run = replace(NUMBERS, hidden_size=2**22), with_layout(micro_batches=8)
    given: Any = SimpleNamespace(
        kind="text", num_samples=100, sequence_length=8, tokens_per_sample=8
    )
    assert _changed_rules(run, wide, given).batch_samples == 8
    with pytest.raises(ConfigurationError, match=r"stages send each other .* at once"):
        _changed_rules(with_layout(micro_batches=1), wide, given)


def test_replicas_have_common_weights_and_momentum_besides() -> None:
    outer = OuterSection.of("diloco", every=5)
    run = replace(RUN, layout=replace(RUN.layout, replicas=2), outer=outer)
    alone, beside = estimate_chain(RUN, NUMBERS), estimate_chain(run, NUMBERS)
    for one, other in zip(alone.stages, beside.stages, strict=True):
        assert other.optimizer - one.optimizer == 2 * one.gradients
    assert beside.state_bytes - alone.state_bytes == 4 * NUMBERS.num_parameters
    # Of 800 samples each takes a half, in rounds of 5 batches of 8.
    assert (alone.num_steps, beside.num_steps) == (100, 50)
    needed = stage_sizes(RUN, NUMBERS).needed(0, 4), stage_sizes(run, NUMBERS).needed(0, 4)
    assert needed[1] - needed[0] == 8 * NUMBERS.num_parameters
    averaging = replace(run, outer=replace(outer, momentum=0.0))
    assert estimate_chain(averaging, NUMBERS).state_bytes == alone.state_bytes


def test_the_largest_piece_is_of_what_learns() -> None:
    numbers = ChainNumbers((10, 30, 20), (0, 0, 0), 60, 25, 28, 8, 16)
    assert numbers.largest_piece == 30
    assert replace(numbers, first=31).largest_piece == 31
    adapted = replace(numbers, adapters=(1, 3, 2), first=0, last=0)
    assert adapted.largest_piece == 3
