"""The simulated device is no CPU: other tensors beside its own, bytes too early and too many are found out."""

from __future__ import annotations

import copy
import faulthandler
import gc
import multiprocessing
import signal
from collections.abc import Iterator
from ctypes import string_at

import pytest
import torch
import transformers as tf

from tests.simulated_device import FIRST, MIB, NUM_DEVICES, SECOND, simulated_devices, used_bytes


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with simulated_devices(16 * MIB):
        yield


def test_torch_sees_two_while_they_are_open() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == NUM_DEVICES == 2


def test_what_is_computed_has_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=90,
    )
    model = tf.LlamaForCausalLM(config).eval()
    token_ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        expected = model(token_ids).logits
        written = model.generate(token_ids, max_new_tokens=5, do_sample=False)
        model = model.to(SECOND)
        got = model(token_ids.to(SECOND)).logits
        assert got.device == SECOND
        assert torch.equal(got.cpu(), expected)
        again = model.generate(token_ids.to(SECOND), max_new_tokens=5, do_sample=False)
    assert torch.equal(again.cpu(), written)


def test_tensors_of_other_places_are_refused() -> None:
    mine = torch.ones(3, device=FIRST)
    for other in (torch.ones(3), torch.ones(3, device=SECOND)):
        for add in (lambda its: mine + its, lambda its: its + mine, mine.add_):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                add(other)
    # As with a GPU, a single number may lie anywhere, and so may indices.
    assert (mine + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert mine[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


def _read(address: int) -> None:
    faulthandler.disable()
    string_at(address, 1)


def test_its_addresses_cannot_be_read() -> None:
    tensor = torch.ones(3, device=FIRST)
    child = multiprocessing.get_context("fork").Process(target=_read, args=(tensor.data_ptr(),))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGSEGV
    with pytest.raises(TypeError, match="can't convert sim:0"):
        tensor.numpy()


def test_memory_is_counted_and_given_back() -> None:
    gc.collect()
    before = used_bytes(0)
    kept = torch.empty(MIB, dtype=torch.uint8, device=FIRST)
    view, twin = kept[10:20], copy.deepcopy(kept)
    assert view.untyped_storage().data_ptr() == kept.data_ptr() != twin.data_ptr()
    assert used_bytes(0) - before == torch.accelerator.memory_allocated(FIRST) - before == 2 * MIB
    assert torch.accelerator.get_memory_info(FIRST) == (14 * MIB - before, 16 * MIB)
    assert used_bytes(1) == 0
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
        torch.empty(15 * MIB, dtype=torch.uint8, device=FIRST)
    torch.empty(15 * MIB, dtype=torch.uint8, device=SECOND)
    del kept, twin
    assert used_bytes(0) - before == MIB
    del view
    assert used_bytes(0) == before


# Streams


def pinned(*values: float) -> torch.Tensor:
    tensor = torch.tensor(values).pin_memory()
    assert tensor.is_pinned()
    return tensor


def test_a_copy_in_another_stream_is_there_when_it_was_waited_for() -> None:
    copying = torch.Stream(FIRST)
    for wait in (
        copying.synchronize,
        lambda: torch.accelerator.current_stream(FIRST).wait_stream(copying),
        lambda: copying.record_event().wait(),
        lambda: copying.record_event().synchronize(),
        lambda: torch.accelerator.synchronize(FIRST),
    ):
        target = torch.zeros(2, device=FIRST)
        with copying:
            target.copy_(pinned(1, 2), non_blocking=True)
        assert target.tolist() == [0, 0]
        torch.accelerator.synchronize(SECOND)
        assert target.tolist() == [0, 0]
        wait()
        assert target.tolist() == [1, 2]


def test_an_event_is_waited_for_and_nothing_after_it() -> None:
    copying, target = torch.Stream(FIRST), torch.zeros(2, device=FIRST)
    with copying:
        target[:1].copy_(pinned(1), non_blocking=True)
        event = copying.record_event()
        target[1:].copy_(pinned(2), non_blocking=True)
    event.synchronize()
    assert event.query()
    assert not copying.query()
    assert target.tolist() == [1, 0]


def test_pinned_memory_is_read_when_the_copy_happens_and_other_memory_at_once() -> None:
    for source, expected in ((pinned(1, 2), [5, 5]), (torch.tensor([1.0, 2.0]), [1, 2])):
        target = torch.zeros(2, device=FIRST)
        target.copy_(source, non_blocking=True)
        source.fill_(5)
        assert target.tolist() == expected


def test_what_goes_to_the_host_arrives_when_the_host_waits() -> None:
    device, host = torch.tensor([1.0, 2.0], device=FIRST), pinned(0, 0)
    host.copy_(device, non_blocking=True)
    device += 10  # after the copy in its stream, so it does not matter
    assert host.tolist() == [0, 0]
    torch.accelerator.synchronize(FIRST)
    assert host.tolist() == [1, 2]
    assert device.cpu().tolist() == [11, 12]


def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(3, device=FIRST).count_nonzero() == 3
