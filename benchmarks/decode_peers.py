"""The same generation by others: Petals over two servers, and llama.cpp over two RPC servers, all on 127.0.0.1.

Neither is among our dependencies. llama.cpp is there with its programs `llama-bench`, `llama-quantize`, `llama-lookup`
and `ggml-rpc-server` (cmake with -DGGML_RPC=ON) on PATH. Petals wants a Python of its own (`petals_peer.py`);
2.2.0.post1 was seen to run with transformers 4.34.1, bitsandbytes 0.41.1, hivemind 1.1.11, all but torch without their
dependencies' versions, and with the p2pd that hivemind 1.1.12 has for Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import IO, Any, cast

import gguf

__all__ = [
    "Generate",
    "Looked",
    "Place",
    "Timing",
    "has_llama_cpp",
    "llama_cpp",
    "llama_lookup",
    "peer_versions",
    "petals",
    "rpc_servers",
    "write_gguf",
]

NUM_SERVERS = 2
DEADLINE = 120.0  # seconds, for a word of a peer or one generation of it
_FORMS = {"int8": "Q8_0", "int4": "Q4_0"}  # what llama.cpp has of the same size


@dataclass
class Timing:
    """One generation: seconds to the first token, and tokens a second after it."""

    first: float
    rate: float


Generate = Callable[[], tuple[Timing, list[int] | None]]
"""Generates once; the tokens where they are known."""


def has_llama_cpp() -> bool:
    """Whether llama.cpp's programs are on PATH."""
    return bool(which("llama-bench") and which("ggml-rpc-server"))


def peer_versions(petals_python: Path | None) -> str:
    """Versions of the other programs that are installed, for a report."""
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
    bounds = [num_layers * i // NUM_SERVERS for i in range(NUM_SERVERS + 1)]
    with contextlib.ExitStack() as stack:
        addresses: list[str] = []
        for first, last in pairwise(bounds):
            blocks = f"{first}:{last}"
            server = stack.enter_context(
                _petals_peer(python, "server", model, blocks, *addresses[:1])
            )
            addresses.append(server.line_that_begins_with("/ip4"))
        client = stack.enter_context(
            _petals_peer(python, "client", model, str(num_tokens), addresses[0])
        )

        def generate() -> tuple[Timing, list[int]]:
            assert client.process.stdin is not None
            print(json.dumps(list(prompt)), file=client.process.stdin, flush=True)
            told = json.loads(client.line_that_begins_with("{"))
            return Timing(told["first"], told["rate"]), told["tokens"]

        yield generate


@contextlib.contextmanager
def llama_cpp(
    model: Any, directory: Path, num_prompt_tokens: int, num_tokens: int, form: str | None
) -> Iterator[Generate]:
    """Two RPC servers with one thread each, caches in float16. llama-bench draws the tokens, so that none are known.

    Args:
        form: of the weights: a key of `_FORMS`; None for float32.
    """
    path = directory / "model.gguf"
    write_gguf(model, path)
    if form is not None:
        whole, path = path, directory / f"model-{form}.gguf"
        _run(["llama-quantize", "--pure", str(whole), str(path), _FORMS[form]])
    places = [Place([], "127.0.0.1", _free_port()) for _ in range(NUM_SERVERS)]
    with rpc_servers(places) as servers:

        def generate() -> tuple[Timing, None]:
            command = ["llama-bench", "-m", str(path), "--rpc", servers, "-ngl", "99"]
            command += ["-t", "1", "-r", "1", "-o", "jsonl"]
            prefill = _bench([*command, "-p", str(num_prompt_tokens), "-n", "0"])
            decode = _bench(
                [*command, "-p", "0", "-n", str(num_tokens), "-d", str(num_prompt_tokens)]
            )
            return Timing(num_prompt_tokens / prefill, decode), None

        yield generate


@dataclass(frozen=True)
class Place:
    """Where a server of llama.cpp's runs.

    Attributes:
        prefix: words that come before its command: it runs in a namespace by them.
        address, port: that it listens at.
    """

    prefix: Sequence[str]
    address: str
    port: int


@contextlib.contextmanager
def rpc_servers(places: Sequence[Place]) -> Iterator[str]:
    """RPC servers with one thread each; gives what llama.cpp's programs take as `--rpc`."""
    with contextlib.ExitStack() as stack:
        for place in places:
            command = [*place.prefix, "ggml-rpc-server", "-H", place.address]
            command += ["-p", str(place.port), "-t", "1"]
            _wait_until_open(place, stack.enter_context(_peer(command, is_read=False)))
        yield ",".join(f"{place.address}:{place.port}" for place in places)


@dataclass(frozen=True)
class Looked:
    """A text that `llama-lookup` wrote.

    Attributes:
        seconds: of all tokens behind the prompt.
        tokens: that were written; a word on `proposed` and `accepted` is theirs.
    """

    seconds: float
    tokens: int
    proposed: int
    accepted: int


def llama_lookup(
    path: Path, servers: str, prompt: str, num_tokens: int, most: int, prefix: Sequence[str] = ()
) -> Looked:
    """Have llama.cpp go on with a text, its model at RPC servers, by n-grams of what there is of it.

    Args:
        path: of the model, in GGUF.
        most: tokens that are proposed at once at most; 0 for none.
        prefix: as in `Place`.
    """
    command = [*prefix, "llama-lookup", "-m", str(path), "--rpc", servers, "-ngl", "99", "-t", "1"]
    command += ["-n", str(num_tokens), "-p", prompt, "--temp", "0", "--ignore-eos"]
    command += ["-c", "1024", "--spec-draft-n-max", str(most)]
    told = _run(command)
    words = told.stdout + told.stderr

    def figure(pattern: str) -> float:
        found = re.search(pattern, words)
        if found is None:
            raise SystemExit(f"llama-lookup did not say {pattern}:\n{words[-2000:]}")
        return float(found[1])

    return Looked(
        seconds=figure(r"decoded +\d+ tokens in +([\d.]+) seconds"),
        tokens=int(figure(r"n_predict += (\d+)")),
        proposed=int(figure(r"n_drafted += (\d+)")),
        accepted=int(figure(r"n_accept += (\d+)")),
    )


def write_gguf(model: Any, path: Path, tokenizer: dict[str, Any] | None = None) -> None:
    """A transformers Llama as GGUF, element by element.

    Args:
        tokenizer: what is in its `tokenizer.json`, of byte pairs as GPT-2 has them; None for no vocabulary.
    """
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
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        for projection, num_heads in heads.items():
            if projection in name:  # llama.cpp turns neighbours, transformers halves
                halves = array.reshape(num_heads, 2, config.head_dim // 2, -1)
                array = halves.swapaxes(1, 2).reshape(array.shape)
        known_as = names.get_name(name, try_suffixes=(".weight",))
        assert known_as is not None, name
        writer.add_tensor(known_as, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: Any) -> None:
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {added["content"] for added in tokenizer["added_tokens"] if added["special"]}
    kinds = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(True)


def _bench(command: list[str]) -> float:
    """Tokens a second of one run of llama-bench."""
    (line,) = _run(command).stdout.splitlines()
    return float(json.loads(line)["avg_ts"])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done


@dataclass
class _Peer:
    """A process of another project's, and what it says on stderr."""

    process: subprocess.Popen[str]
    log: IO[str]

    def line_that_begins_with(self, start: str) -> str:
        """The next such line of its stdout: libraries print others, too."""
        assert self.process.stdout is not None
        timer = threading.Timer(DEADLINE, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(start):
                    return line.strip()
        finally:
            timer.cancel()
        raise self.failed(f"did not say {start}…")

    def failed(self, what: str) -> SystemExit:
        """The error that ends the benchmark."""
        self.log.seek(0)
        command = " ".join(map(str, cast(Sequence[object], self.process.args)))
        when = f"within {DEADLINE:g} s" if self.process.poll() is None else "and has ended"
        return SystemExit(f"{command} {what} {when}:\n{self.log.read()[-2000:]}")


def _petals_peer(
    python: Path, role: str, model: Path, *args: str
) -> contextlib.AbstractContextManager[_Peer]:
    program = str(Path(__file__).with_name("petals_peer.py"))
    return _peer([str(python), "-W", "ignore", program, role, str(model), *args])


@contextlib.contextmanager
def _peer(command: list[str], *, is_read: bool = True) -> Iterator[_Peer]:
    """A process, in a session of its own: Petals' servers leave children behind otherwise.

    Args:
        is_read: whether somebody reads its stdout; else that goes to its log.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_read else log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            yield _Peer(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_open(place: Place, peer: _Peer) -> None:
    knock = f"import socket; socket.create_connection({(place.address, place.port)!r}, 5).close()"
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until and peer.process.poll() is None:
        command = [*place.prefix, sys.executable, "-c", knock]  # from where it is
        if not subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            return
        time.sleep(0.1)
    raise peer.failed(f"did not listen at {place.address}:{place.port}")
