"""Memory that is not used any more: pages of files that were read, codes that were sent, and what was freed."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from neurogrid.model.files.blob import CodedBlob, CodedMatrix, LayerContents, RecentLayers
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.quantization import METHODS
from neurogrid.model.kernels import Codes, quantize
from neurogrid.model.unused_memory import give_back_memory, let_go_pages

MIB = 2**20
STATUS = Path("/proc/self/status")

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="this system does not tell")


def resident(what: str) -> int:
    """Bytes of `RssFile` or `RssAnon`."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def test_pages_of_a_file_that_were_read_go_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (64 * MIB // 256))
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    before = resident("RssFile")
    assert sum(view[::4096]) == 0
    assert resident("RssFile") - before > 60 * MIB
    let_go_pages(view[MIB:])
    assert resident("RssFile") - before < 4 * MIB
    assert bytes(view[-3:]) == b"\xfd\xfe\xff"


def test_what_may_be_written_to_stays() -> None:
    for data in (mmap.mmap(-1, MIB), bytearray(MIB), b"x" * MIB):
        view = memoryview(data)
        if not view.readonly:
            view[:1] = b"x"
        let_go_pages(view)
        assert view[:1] == b"x"


@pytest.mark.parametrize("quantize_as", ["none", "int4"])
def test_a_layer_that_was_read_takes_no_memory(large: Path, quantize_as: str) -> None:
    """In a new process: what has been in a heap of 900 MB decides what is given back of it."""
    told = subprocess.run(
        [sys.executable, __file__, str(large), quantize_as],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    of_files, own = map(int, told.stdout.split())
    assert of_files < 8 * MIB
    assert own < 8 * MIB


def read_layers() -> None:
    """Read each layer, and print by how much the resident pages of files have grown, and this process's own."""
    from neurogrid.model.files.config import build_config
    from neurogrid.model.stages.stage import Ends

    path, quantize_as = sys.argv[1:]
    large = Checkpoint.open(Path(path))
    ends = Ends(build_config(large.config), dtype=torch.bfloat16, device="cpu")
    quantization = large.quantization(None if quantize_as == "none" else quantize_as, ends)
    give_back_memory()
    before = resident("RssFile"), resident("RssAnon")
    for layer_id in range(large.num_layers):
        blob = large.layer_blob(layer_id, quantization)
        assert blob.is_made == (quantization is not None)
        with blob.held():
            assert len(blob.digests()) == 32 * blob.num_chunks
            assert sum(map(len, blob.chunks())) == blob.num_bytes
    give_back_memory()
    print(resident("RssFile") - before[0], resident("RssAnon") - before[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of which the layers are 56 MiB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    from_config = AutoModelForCausalLM.from_config
    from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


class Layer:
    """The blob of one matrix as codes, and how often it was made."""

    def __init__(self, recent: RecentLayers) -> None:
        self.num_made = 0
        matrix = CodedMatrix((64, 64), METHODS["int8"], self._make)
        self.blob = CodedBlob(LayerContents({}, matrices={"w.weight": matrix}), recent)

    def _make(self) -> Codes:
        self.num_made += 1
        return quantize(torch.ones(64, 64), 8)

    def read(self) -> None:
        assert self.blob.chunk(0)


def test_layers_on_their_way_are_made_once_each_however_many_they_are() -> None:
    recent = RecentLayers()
    layers = [Layer(recent) for _ in range(8)]
    holding = [layer.blob.held() for layer in layers]
    for each in holding:
        each.__enter__()
    for _ in range(3):
        for layer in layers:
            layer.read()
    with layers[0].blob.held():  # of another worker
        layers[0].read()
    layers[0].read()
    assert [layer.num_made for layer in layers] == [1] * 8
    for each in holding:
        each.__exit__(None, None, None)
    for layer in layers:
        layer.read()
    assert [layer.num_made for layer in layers] == [2] * 8


def test_of_layers_that_nobody_holds_the_last_one_is_there() -> None:
    recent = RecentLayers()
    one, other = Layer(recent), Layer(recent)
    one.blob.digests()
    one.read()
    assert one.num_made == 1
    other.read()
    one.read()
    assert (one.num_made, other.num_made) == (2, 1)


def test_nobody_waits_for_a_layer_that_is_being_made() -> None:
    recent = RecentLayers()
    slow, other = Layer(recent), Layer(recent)
    begun, may_end = threading.Event(), threading.Event()
    make = slow._make

    def make_slowly() -> Codes:
        begun.set()
        assert may_end.wait(60)
        return make()

    matrix = CodedMatrix((64, 64), METHODS["int8"], make_slowly)
    slow.blob = CodedBlob(LayerContents({}, matrices={"w.weight": matrix}), recent)
    with other.blob.held():
        other.read()
        thread = threading.Thread(target=slow.read)
        thread.start()
        try:
            assert begun.wait(60)
            with slow.blob.held():
                other.read()
        finally:
            may_end.set()
            thread.join()
    assert (slow.num_made, other.num_made) == (1, 1)


def test_what_was_freed_is_given_back() -> None:
    # Pieces small enough for the heap, and one behind them that keeps its end.
    pieces = [bytearray(64 * 1024) for _ in range(1024)]
    last = [bytearray(64 * 1024)]
    before = resident("RssAnon")
    del pieces
    give_back_memory()
    assert before - resident("RssAnon") > 48 * MIB
    assert last


if __name__ == "__main__":
    read_layers()
