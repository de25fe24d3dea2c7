"""What a user can do wrong: each mistake ends the real command with one line that names it and a status.

Status 2 is what the user mistyped, 1 what failed. What needs no worker is told before any is waited for.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from neurogrid import CoordinatorSettings
from neurogrid.errors import NoRouteError
from tests.e2e.commands import Ended, expect, expect_at_once, patiently, run_preloaded
from tests.e2e.preloaded import DEADLINE, WORKER, Popen
from tests.e2e.support import WorkerProcess, run_coordinator, start_worker
from tests.families import FAMILIES, save_checkpoint

USAGE, FAILURE = 2, 1
# A peer id that is nobody's, on a port where nobody listens.
PEER_ID = "12D3KooWGRUPGPvcvyhCwDCZ8oMZjXtKL4GmFzq6v8fSZ1T4bXhN"
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}"
PROMPT = ("--prompt", "x")

# Options


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "there is no worker to run on: name some with --peer"),
        (
            ["--http-host", "0.0.0.0"],
            "0.0.0.0 is not loopback.*add --api-key-file FILE.*--insecure",
        ),
        (["--http-host", "nobody.invalid"], "nobody.invalid is no address and no name"),
        (["--api-key-file", "/nowhere/k"], "cannot read the API keys in /nowhere/k: No such file"),
        (["--cors-origin", "chat.example"], "'chat.example' is no origin: scheme and host"),
        ([*PROMPT, "--peer", "here"], "--peer: 'here' is not a multiaddr: expected /ip4/"),
        (
            [*PROMPT, "--peer", "/ip4/127.0.0.1/tcp/9000"],
            "--peer: .* names no peer id: expected /ip4/",
        ),
        ([*PROMPT, "--peer", NOBODY.replace("tcp", "udp")], "--peer: .* has no TCP port: expected"),
        ([*PROMPT, "--bootstrap", "here"], "--bootstrap: 'here' is not a multiaddr"),
        ([*PROMPT, "--stages", "two"], "--stages: 'two' is no whole number"),
        ([*PROMPT, "--min-peers", "-1"], "--min-peers: -1 is not between 0 and"),
        ([*PROMPT, "--wait", "nan"], "--wait: nan is not above zero"),
        ([*PROMPT, "--peer-vram-gb", "1e300"], "--peer-vram-gb: 1e300 is not .* at most"),
        ([*PROMPT, "--p2p-port", "99999"], "--p2p-port: 99999 is no port: 0 to 65535"),
        ([*PROMPT, "--max-tokens", "-5"], "--max-tokens: -5 is not between 1 and"),
        ([*PROMPT, "--dtype", "int4"], "--dtype: invalid choice: 'int4' .*float32"),
        ([*PROMPT, "--prompt-file", "f"], "--prompt-file: not allowed with argument --prompt"),
        ([*PROMPT, "--modell", "m"], "unrecognized arguments: --modell m: is --model meant?"),
        (["--prompt-file", "/nowhere/p"], "cannot read the prompt from /nowhere/p: No such file"),
        (
            [*PROMPT, "--listen", "there"],
            "'there' is not a multiaddr: expected /ip4/ADDRESS/tcp/PORT",
        ),
        (
            [*PROMPT, "--listen", "/ip4/0.0.0.0/tcp/0"],
            "0.0.0.0/tcp/0 is not loopback.*add --cluster.*--insecure",
        ),
        (
            [*PROMPT, "--listen", "/ip4/192.0.2.1/tcp/0"],
            "cannot listen on .*no address of this machine",
        ),
        (["--prompt", b"\xff"], "the prompt in the command line is not UTF-8"),
    ],
    ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, list) else "",
)
def test_what_the_coordinator_cannot_be_told(args: list[str | bytes], says: str) -> None:
    expect_at_once(run_preloaded("coordinator", *args), status=USAGE, says=says)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([*PROMPT, "--temperature", "-1"], "--temperature must be a number from 0 .*, got -1"),
        ([*PROMPT, "--top-p", "1.5"], "--top-p must be a number above 0 and at most 1 .*, got 1.5"),
        ([*PROMPT, "--top-k", "-1"], "--top-k must be a whole number from 0 .*, got -1"),
        ([*PROMPT, "--seed", "-1"], "--seed must be a whole number from 0 to .*, got -1"),
        ([*PROMPT], "there is no worker to run on: name some with --peer"),
        (
            [*PROMPT, "--peer", NOBODY, "--stages", "2"],
            "--stages 2 takes as many workers, and 1 .*--peer",
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_however_long_one_waits(args: list[str], says: str) -> None:
    expect_at_once(run_preloaded("coordinator", *args), status=USAGE, says=says)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--wait-for-assignment"], "--wait-for-assignment needs --model"),
        (["--serve", "--data", "."], "--data is for training runs: leave out --serve, or give"),
        (["--data", "/nonexistent"], "--data /nonexistent: there is no such directory"),
        (["--bootstrap", "here"], "--bootstrap: 'here' is not a multiaddr: expected /ip4/"),
        (["--memory-limit", "much"], "--memory-limit: 'much' is no size: try 8GiB"),
        (["--memory-limit", "1e30"], "--memory-limit: 1e30 is not .*below 2.63 bytes"),
        (["--max-seq-len", "x"], "--max-seq-len: 'x' is no whole number"),
        (["--gpu", "-1"], "there is no GPU -1"),
        (["--gpu", "0", "--device", "cpu"], "--device: not allowed with argument --gpu"),
        (["--listen", "/ip4/0.0.0.0/tcp/0"], "is not loopback.*add --cluster.*--insecure"),
        (["--listen", "/ip4/127.0.0.1/tcp/0", "--port", "1"], "give either --port or --listen"),
        (["--model", "/nowhere/m", "--port", "0"], "/nowhere/m does not exist; give the directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_worker_cannot_be_told(args: list[str], says: str) -> None:
    expect(run_preloaded("worker", *args), status=USAGE, says=says)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    for args, name in ((["--gpu", "0"], "gpu:0"), (["--device", "cuda:1"], "cuda:1")):
        says = f"there is no {name} here: torch sees cpu alone"
        expect(run_preloaded("worker", *args, "--port", "0"), status=USAGE, says=says)


def test_a_prompt_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"caf\xe9")
    says = f"the prompt in {file} is not UTF-8 text"
    expect_at_once(
        run_preloaded("coordinator", "--prompt-file", str(file)), status=USAGE, says=says
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(("command", "flag"), [("worker", "--port"), ("coordinator", "--p2p-port")])
def test_a_port_that_was_asked_for_and_is_taken(command: str, flag: str, taken_port: int) -> None:
    more = [*PROMPT, "--peer", NOBODY] if command == "coordinator" else []
    says = (
        f"cannot listen on /ip4/127.0.0.1/tcp/{taken_port}: address already in use; choose another"
    )
    expect_at_once(run_preloaded(command, *more, flag, str(taken_port)), status=USAGE, says=says)


def hold_port(holder: socket.socket, port: int) -> None:
    """Listen on a fixed port; waits for whoever has it now, since that one may let go any time."""
    give_up = time.monotonic() + DEADLINE
    while True:
        try:
            holder.bind(("127.0.0.1", port))
            break
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
    holder.listen()


def test_the_default_port_gives_way_with_a_notice() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold_port(holder, 9000)
        process = Popen(WORKER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            process.terminate()
            _, stderr = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert "/ip4/127.0.0.1/tcp/9000 is taken: listening on a free port instead" in stderr
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert "/tcp/9000/" not in address
    assert process.returncode == 0


# The model directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint in several shards, without a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES[1], path)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.fixture
def checkpoint(llama: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return shutil.copytree(llama, tmp_path / "model")


def refuse_model(path: Path, *, says: str, status: int = FAILURE) -> None:
    args = (*PROMPT, "--peer", NOBODY, "--model", str(path))
    expect_at_once(run_preloaded("coordinator", *args), status=status, says=says)


def test_no_such_model(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    refuse_model(path, says=f"{path} does not exist; give the directory", status=USAGE)


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refuse_model(checkpoint, says="config.json: missing .*is .* the directory of a model")


def test_a_config_that_is_no_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    refuse_model(checkpoint, says="config.json: not valid JSON; fetch the file again")


def test_pickled_weights_only(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, checkpoint / "pytorch_model.bin")
    refuse_model(
        checkpoint, says="pytorch_model.bin: only safetensors and GGUF are read; convert it"
    )


def shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("model-*.safetensors"))[1]


def test_a_corrupt_shard(checkpoint: Path) -> None:
    file = shard(checkpoint)
    data = bytearray(file.read_bytes())
    data[8:40] = bytes(32)
    file.write_bytes(data)
    refuse_model(checkpoint, says=f"{file}: ")


def test_a_shard_whose_length_lies(checkpoint: Path) -> None:
    file = shard(checkpoint)
    file.write_bytes(struct.pack("<Q", 2**62) + file.read_bytes()[8:])
    refuse_model(checkpoint, says=f"{file}: ")


def test_a_truncated_shard(checkpoint: Path) -> None:
    file = shard(checkpoint)
    file.write_bytes(file.read_bytes()[:-1000])
    refuse_model(checkpoint, says=f"{file}: .*trunc")


def test_a_missing_shard(checkpoint: Path) -> None:
    file = shard(checkpoint)
    file.unlink()
    refuse_model(checkpoint, says=f"{file}: missing, and model.safetensors.index.json names it")


def test_no_tokenizer(llama: Path) -> None:
    refuse_model(llama, says=f"{llama}: no tokenizer; copy tokenizer.json")


@pytest.mark.parametrize(
    ("class_name", "sizes", "says"),
    [
        ("MambaForCausalLM", {"num_hidden_layers": 2, "hidden_size": 32}, "cannot be split: "),
        ("T5ForConditionalGeneration", {"d_kv": 8}, "has no causal language model"),
        (
            "BartForConditionalGeneration",
            {
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 16,
                "decoder_ffn_dim": 16,
            },
            "cannot be split: it has an encoder and a decoder",
        ),
    ],
)
def test_an_architecture_that_cannot_be_split(
    class_name: str, sizes: dict[str, int], says: str, tmp_path: Path
) -> None:
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{"vocab_size": 64, "d_model": 16, "num_layers": 2, **sizes})
    model_class(config).save_pretrained(tmp_path)
    refuse_model(tmp_path, says=f"model type '{config.model_type}' {says}")


def test_an_architecture_that_brings_its_own_code(checkpoint: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "code.py").write_text("raise SystemExit('ran')")
    refuse_model(checkpoint, says="'mine' is unknown .*the code that it brings is never run")


def refuse_own_model(path: Path, *, says: str) -> None:
    expect(run_preloaded("worker", "--port", "0", "--model", str(path)), status=FAILURE, says=says)


def test_a_workers_own_model_that_is_broken(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["intermediate_size"] //= 2
    (checkpoint / "config.json").write_text(json.dumps(config))
    refuse_own_model(checkpoint, says="the weights of layer 0 do not fit its config: .*shape")
    file = shard(checkpoint)
    file.write_bytes(file.read_bytes()[:-1000])
    refuse_own_model(checkpoint, says=f"{file}: truncated")
    (checkpoint / "config.json").unlink()
    refuse_own_model(checkpoint, says="config.json: missing")


def test_more_stages_than_layers() -> None:
    args = (*PROMPT, "--stages", "9", "--min-peers", "9")
    says = "9 stages .*are more than the 8 layers of .*ask for at most 8"
    expect_at_once(run_preloaded("coordinator", *args), status=USAGE, says=says)


def test_a_prompt_longer_than_a_session() -> None:
    args = ("--prompt", "x " * 20, "--peer", NOBODY, "--max-seq-len", "16")
    says = r"the prompt has \d+ tokens .*sessions have at most 16 \(--max-seq-len"
    expect_at_once(run_preloaded("coordinator", *args), status=USAGE, says=says)


# Workers


def test_workers_that_do_not_come(workers: list[WorkerProcess]) -> None:
    """Nobody is at the address, or another peer, or fewer are there than asked for; all at once, since each waits."""
    address = workers[0].address
    another = f"{address.rpartition('/')[0]}/{PEER_ID}"
    waits = {
        ("--peer", NOBODY): f"0 of 1 workers were there after .*{NOBODY}: connection refused",
        ("--peer", another): "0 of 1 workers .*another peer lives there",
        ("--peer", address, "--min-peers", "2"): "1 of 2 workers .* s. Start neurogrid-worker",
    }

    def run(args: tuple[str, ...]) -> Ended:
        return patiently(
            lambda wait: run_preloaded("coordinator", *PROMPT, *args, "--wait", wait),
            lambda ended: re.search(waits[args], ended.error) is not None,
        )

    with ThreadPoolExecutor() as pool:
        for ended, says in zip(pool.map(run, waits), waits.values(), strict=True):
            expect(ended, status=FAILURE, says=says)


@pytest.fixture(scope="module")
def small_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    directory = tmp_path_factory.mktemp("small")
    with start_worker(directory, "--memory-limit", "2MiB", "--max-seq-len", "64") as worker:
        yield worker


def test_layers_that_fit_no_worker(small_worker: WorkerProcess) -> None:
    args = (*PROMPT, "--local-layers", "none", "--peer", small_worker.address)
    says = r"the layers do not fit: [\d,]+ B needed, 1,887,436 B available on 1 worker \("
    expect(run_preloaded("coordinator", *args), status=FAILURE, says=says)


def test_sessions_longer_than_the_worker_takes(small_worker: WorkerProcess, llama: Path) -> None:
    settings = CoordinatorSettings(model=llama, peers=(small_worker.address,), max_seq_len=65)
    with pytest.raises(NoRouteError, match="takes 64: start it with a larger --max-seq-len"):
        run_coordinator(settings)


def test_the_same_workers_serve_after_all_that(workers: list[WorkerProcess]) -> None:
    ended = run_preloaded(
        "coordinator", "--prompt", "A class", "--max-tokens", "4", "--peer", workers[0].address
    )
    assert ended.status == 0, ended
    assert len(ended.stdout) > 4
