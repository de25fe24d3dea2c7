"""The same generation by others: Petals over two servers, and llama.cpp over two RPC servers, all on 127.0.0.1.

Neither is among our dependencies. llama.cpp is there with its programs `llama-bench` and `ggml-rpc-server` (cmake with
-DGGML_RPC=ON) on PATH, and the package `gguf`, which writes the model for it. Petals wants a Python of its own
(`petals_peer.py`); 2.2.0.post1 was seen to run with transformers 4.34.1, bitsandbytes 0.41.1, hivemind 1.1.11, all but
torch without their dependencies' versions, and with the p2pd that hivemind 1.1.12 has for Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import IO, Any

__all__ = ["Generate", "Timing", "has_llama_cpp", "llama_cpp", "peer_versions", "petals"]

NUM_SERVERS = 2
LOADED_WITHIN = 60  # attempts to reach a server that has just been started, half a second each


@dataclass
class Timing:
    """One generation: seconds to the first token, and tokens a second after it."""

    first: float
    rate: float


Generate = Callable[[], tuple[Timing, list[int] | None]]
"""Generates once; the tokens where they are known."""


def has_llama_cpp() -> bool:
    """Whether llama.cpp's programs are on PATH, and what writes a model for them is installed."""
    return bool(which("llama-bench") and which("ggml-rpc-server") and find_spec("gguf"))


def peer_versions(petals_python: Path | None) -> str:
    """What is installed, for a report."""
    llama = "none"
    if has_llama_cpp():
        told = _run(["llama-bench", "--version"])
        llama = (told.stdout + told.stderr).splitlines()[0].removeprefix("version: ")
    swarm = "none"
    if petals_python is not None:
        program = (
            "from importlib.metadata import version as v; print(*map(v, ('petals', 'hivemind')))"
        )
        swarm = "{} with hivemind {}".format(
            *_run([str(petals_python), "-c", program]).stdout.split()
        )
    return f"llama.cpp: {llama}; Petals: {swarm}"


@contextlib.contextmanager
def petals(
    python: Path, model: Path, num_layers: int, prompt: Sequence[int], num_tokens: int
) -> Iterator[Generate]:
    """A swarm of two servers with half of the layers each, and a client that takes their activations in turn."""
    half = num_layers // NUM_SERVERS
    with contextlib.ExitStack() as stack:
        addresses: list[str] = []
        for first in range(0, num_layers, half):
            blocks = f"{first}:{first + half}"
            server = stack.enter_context(
                _petals_peer(python, "server", model, blocks, *addresses[:1])
            )
            addresses.append(_line_that_begins_with("/ip4", server))
        client = stack.enter_context(
            _petals_peer(python, "client", model, str(num_tokens), addresses[0])
        )

        def generate() -> tuple[Timing, list[int]]:
            assert client.stdin is not None
            print(json.dumps(list(prompt)), file=client.stdin, flush=True)
            told = json.loads(_line_that_begins_with("{", client))
            return Timing(told["first"], told["rate"]), told["tokens"]

        yield generate


@contextlib.contextmanager
def llama_cpp(
    model: Any, directory: Path, num_prompt_tokens: int, num_tokens: int
) -> Iterator[Generate]:
    """Two RPC servers with one thread each, caches in float16. llama-bench draws the tokens, so that none are known."""
    path = directory / "model.gguf"
    write_gguf(model, path)
    with contextlib.ExitStack() as stack:
        ports = [_free_port() for _ in range(NUM_SERVERS)]
        for port in ports:
            command = ["ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            stack.enter_context(_process(command, stdout=subprocess.DEVNULL))
        for port in ports:
            _wait_until_open(port)
        servers = ",".join(f"127.0.0.1:{port}" for port in ports)

        def generate() -> tuple[Timing, None]:
            command = ["llama-bench", "-m", str(path), "--rpc", servers, "-ngl", "99"]
            command += ["-t", "1", "-r", "1", "-o", "jsonl"]
            prefill = _bench([*command, "-p", str(num_prompt_tokens), "-n", "0"])
            decode = _bench(
                [*command, "-p", "0", "-n", str(num_tokens), "-d", str(num_prompt_tokens)]
            )
            return Timing(num_prompt_tokens / prefill, decode), None

        yield generate


def write_gguf(model: Any, path: Path) -> None:
    """A transformers Llama as GGUF, element by element, with no vocabulary."""
    import gguf  # type: ignore[import-not-found,unused-ignore]

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        for projection, num_heads in heads.items():
            if projection in name:  # llama.cpp turns neighbours, transformers halves
                halves = array.reshape(num_heads, 2, config.head_dim // 2, -1)
                array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bench(command: list[str]) -> float:
    """Tokens a second of one run of llama-bench."""
    (line,) = _run(command).stdout.splitlines()
    return float(json.loads(line)["avg_ts"])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _petals_peer(
    python: Path, role: str, model: Path, *args: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    program = str(Path(__file__).with_name("petals_peer.py"))
    command = [str(python), "-W", "ignore", program, role, str(model), *args]
    return _process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextlib.contextmanager
def _process(
    command: list[str], *, stdin: int | None = None, stdout: int
) -> Iterator[subprocess.Popen[str]]:
    """A process, in a session of its own: Petals' servers leave children behind otherwise."""
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        _close(process.stdin, process.stdout)


def _close(*files: IO[str] | None) -> None:
    for file in files:
        if file is not None:
            file.close()


def _line_that_begins_with(start: str, process: subprocess.Popen[str]) -> str:
    """The next such line: libraries print others, too."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.strip()
    raise SystemExit(f"{process.args!r} ended: run it by hand to see why")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_open(port: int) -> None:
    for _ in range(LOADED_WITHIN):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.5)
    raise SystemExit(f"no RPC server answers at port {port}")
