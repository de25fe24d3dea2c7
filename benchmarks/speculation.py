"""Gain of proposed tokens, by the text that is written, by how far the workers are, and by how many are proposed.

    python benchmarks/speculation.py --rounds 3         as root, for namespaces

Two workers with a stage each, over loopback, and over lines with a delay (network namespaces, and a forwarder of ours).
The text is given: after each pass, and after the model's own choice was made, the text's next token is taken, so that
every kind of text can be written by a model that knows none of them. Everything else is as it is served: the proposals,
the passes, the way there and back. Each round writes each text without proposals and with at most 4, 8 and 16, in turn.
The draft model is the embedded one, whose own choice is replaced by the right token four times out of five.

Two texts more are the embedded model's own, its likeliest tokens in float32: those llama.cpp writes as well, where its
`llama-lookup` is on PATH, over two RPC servers in the same places, by n-grams of what there is of the text.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import inspect
import json
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from shutil import which
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import trio
from decode import SIZES, make_model
from decode_peers import Place, llama_lookup, peer_versions, rpc_servers, write_gguf
from report import spread, table, write_report
from transformers import AutoModelForCausalLM

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.inference.generation import coordinator as generation
from neurogrid.inference.generation.draft_model import Draft, DraftModel
from neurogrid.inference.generation.sampling import Sampler
from neurogrid.inference.speculation import speculation
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.node.torch_thread import TorchThread
from neurogrid.training.testnet.network import Lines, open_network

NUM_STAGES: Final = 2
MAX_LENGTH: Final = 1536
PROMPT_TOKENS: Final = 400
LENGTHS: Final = (0, 4, 8, 16)  # proposed at most; 0 for no proposals
ACCEPTANCE: Final = 0.8
PORT: Final = 4001


@dataclass(frozen=True)
class Text:
    """Text that is written, and the prompt before it.

    Attributes:
        tokens: that are written; None for those that the model chooses.
        drafted: a draft model writes ahead, which is right four times out of five.
    """

    name: str
    prompt: list[int]
    tokens: list[int] | None
    drafted: bool = False


def texts(num_tokens: int) -> list[Text]:
    """Texts of the kinds that people have written, in tokens of the embedded model."""
    encode = Checkpoint.open(embedded_model_path()).open_tokenizer().encode
    prose, more = topics["with"] + topics["try"], topics["while"] + topics["for"]
    source = inspect.getsource(textwrap)
    part = source[source.index("    def _munge_whitespace") :][:6000]
    edited = part.replace("text", "words").replace("self.width", "self.columns")
    passage = encode(prose)[:PROMPT_TOKENS]
    quoted: list[int] = []
    for at in range(0, PROMPT_TOKENS, 60):
        quoted += [*encode(more)[at : at + 12], *passage[at : at + 45]]
    records = [
        json.dumps(
            {
                "id": number,
                "name": f"worker-{number * 37 % 101}",
                "layers": [number, number + 8],
                "state": ["ready", "receiving", "leaving"][number % 3],
                "free_bytes": number * 7919,
            }
        )
        for number in range(60)
    ]

    def of(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> Text:
        return Text(name, list(prompt)[-PROMPT_TOKENS:], list(tokens)[:num_tokens])

    prose_ids, source_ids = encode(prose + more), encode(source)
    record_ids = encode("\n".join(records))
    kinds = [
        of("prose", prose_ids[:PROMPT_TOKENS], prose_ids[PROMPT_TOKENS:]),
        of("source", source_ids[:PROMPT_TOKENS], source_ids[PROMPT_TOKENS:]),
        of("edit", encode(part)[:PROMPT_TOKENS], encode(edited)),
        of("quotation", passage, quoted),
        of("JSON", record_ids[:PROMPT_TOKENS], record_ids[PROMPT_TOKENS:]),
    ]
    own = [Text(f"own, after {kind.name}", kind.prompt, None) for kind in (kinds[0], kinds[-1])]
    return [*kinds, Text("prose, drafted", kinds[0].prompt, kinds[0].tokens, drafted=True), *own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 40.0], help="one way, ms")
    parser.add_argument("--texts", nargs="+", help="only these; none for all")
    parser.add_argument("--size", choices=("embedded", *SIZES), default="embedded")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside:
        trio.run(write_all, json.loads(options.inside))
        return
    rows: list[list[str]] = []
    with TemporaryDirectory() as directory:
        path = embedded_model_path()
        if options.size != "embedded":
            path = Path(directory) / "model"
            make_model(SIZES[options.size], path, dtype="float32")
        for delay in options.delays:
            measured = trio.run(measure, path, delay / 1e3, options, Path(directory))
            rows += rows_of(delay, measured, options.rounds)
    size = "" if options.size == "embedded" else f"-{options.size}"
    told = f"; {peer_versions(None).partition(';')[0]}" if _has_lookup() else ""
    delay = options.delays[0]
    # One place at a time does not take the place of all of them.
    where = "" if options.delays[1:] else f"-{delay:g}ms" if delay else "-loopback"
    where += "" if options.texts is None else "-some"
    write_report(
        f"speculation{size}{where}",
        f"Text that is given, behind prompts of {PROMPT_TOKENS} tokens, {options.tokens} tokens each, over "
        f"{NUM_STAGES} workers: tokens a pass, and the time of the tokens after the first without proposals over that "
        f"with them, in the same round. Medians of {options.rounds} rounds (minimum to maximum); the model is "
        f"{options.size}, in float32, of llama.cpp as well; one thread a process. Arms take turns, llama.cpp's after "
        f"ours{told}.",
        table(
            [
                "ms a hop",
                "text",
                "proposed at most",
                "tokens a pass",
                "accepted",
                "ms a token",
                "x without",
            ],
            rows,
        ),
    )


def rows_of(delay: float, measured: dict[str, Any], rounds: int) -> list[list[str]]:
    rows = []
    for name, arms in measured.items():
        without = [each["seconds"] for each in arms["0"]]
        for length in map(str, LENGTHS):
            runs = arms[length]
            seconds = [each["seconds"] for each in runs]
            gains = [b / s for b, s in zip(without, seconds, strict=True)]
            proposed = sum(each["proposed"] for each in runs)
            accepted = sum(each["accepted"] for each in runs)
            tokens = sum(each["tokens"] for each in runs)
            rows.append(
                [
                    f"{delay:g}",
                    name,
                    length,
                    f"{tokens / (tokens - accepted):.2f}",
                    f"{accepted / proposed:.2f}" if proposed else "",
                    f"{1e3 * median(s / each['tokens'] for s, each in zip(seconds, runs, strict=True)):.1f}",
                    spread(gains).show(2),
                ]
            )
    return rows


def _in_turn(number: int) -> tuple[int, ...]:
    """The arms of a round, of which each has each place."""
    first = number % len(LENGTHS)
    return LENGTHS[first:] + LENGTHS[:first]


async def measure(
    path: Path, delay: float, options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """The runs of each text and length, by a coordinator in a process of its own."""
    names = ["leader", *(f"worker-{number}" for number in range(NUM_STAGES))]
    async with contextlib.AsyncExitStack() as stack:
        commands = {name: ([], "127.0.0.1", 0) for name in names}
        if delay:
            network = await stack.enter_async_context(
                open_network(names, Lines(delay=delay), directory / "network.log")
            )
            commands = {
                name: (network.command(name), network.address(name), PORT) for name in names
            }
        addresses = [
            stack.enter_context(worker(*commands[name])) for name in names if name != "leader"
        ]
        prefix, address, port = commands["leader"]
        told = {
            "model": str(path),
            "peers": addresses,
            "listen": f"/ip4/{address}/tcp/{port}",
            "tokens": options.tokens,
            "rounds": options.rounds,
            "texts": options.texts,
        }
        command = [*prefix, sys.executable, __file__, "--inside", json.dumps(told)]
        done = await trio.run_process(command, capture_stdout=True)
        written = dict(json.loads(done.stdout.decode().splitlines()[-1]))
        if _has_lookup() and options.size == "embedded":
            leader, *servers = (Place(*commands[name][:2], PORT + 1) for name in names)
            if not delay:  # in one place with each other
                servers = [Place([], "127.0.0.1", PORT + n) for n in range(1, NUM_STAGES + 1)]
            theirs = partial(write_all_by_llama, leader, servers, options, directory)
            written |= await trio.to_thread.run_sync(theirs)
        return written


def _has_lookup() -> bool:
    return which("llama-lookup") is not None and which("ggml-rpc-server") is not None


def write_all_by_llama(
    leader: Place, servers: Sequence[Place], options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """The runs of llama.cpp, of each text that is the model's own, and each length."""
    path = directory / "model.gguf"
    if not path.exists():
        model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
        tokenizer = json.loads((embedded_model_path() / "tokenizer.json").read_text())
        write_gguf(model, path, tokenizer)
    decode = Checkpoint.open(embedded_model_path()).open_tokenizer().decode
    writes: dict[str, dict[str, list[dict[str, float]]]] = {}
    with rpc_servers(servers) as rpc:
        for number in range(options.rounds + 1):
            for text in texts(options.tokens):
                is_asked_for = options.texts is None or text.name in options.texts
                if text.tokens is not None or not is_asked_for:
                    continue
                prompt = decode(text.prompt)
                for length in _in_turn(number):
                    run = llama_lookup(path, rpc, prompt, options.tokens, length, leader.prefix)
                    if number:  # the first warms up
                        runs = writes.setdefault(f"{text.name}, by llama.cpp", {})
                        runs.setdefault(str(length), []).append(asdict(run))
    return writes


@contextlib.contextmanager
def worker(prefix: Sequence[str], address: str, port: int) -> Iterator[str]:
    """A worker that runs until the block is left; gives its address."""
    command = [
        *(*prefix, sys.executable, "-m", "neurogrid.cli.commands.worker", "--no-cache"),
        *("--log-level", "error", "--insecure", "--listen", f"/ip4/{address}/tcp/{port}"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


# --------------------------------------------------------------------------- in the coordinator's process


class Given(Sampler):
    """Makes its choice, and takes the next token of the text instead, where one is given."""

    text: Sequence[int] | None = None  # for what it has chosen

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = iter(self.text or ())

    def sample(self, logits: torch.Tensor) -> int:
        chosen = super().sample(logits)
        return chosen if self.text is None else next(self._left)


class GivenDraft(Draft):
    """Runs the draft model, and is right as often as it is to be."""

    text: Sequence[int] = ()  # with its prompt
    chances: random.Random = random.Random(0)

    def _feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits_V = torch.full_like(super()._feed(token_ids), -10.0)
        at = len(self._fed)
        right = self.text[at] if at < len(self.text) else 0
        is_right = self.chances.random() < ACCEPTANCE
        logits_V[right if is_right else (right + 1) % len(logits_V)] = 0.0
        logits_V[0] = max(float(logits_V[0]), -1.4)  # it is sure of it to four fifths
        return logits_V


async def write_all(told: dict[str, Any]) -> None:
    """Write all texts, and print what came of it."""
    generation.Sampler = Given  # type: ignore[misc]
    writes: dict[str, dict[str, list[dict[str, float]]]] = {}
    settings = CoordinatorSettings(
        model=Path(told["model"]),
        peers=tuple(told["peers"]),
        listen=(told["listen"],),
        stages=NUM_STAGES,
        max_seq_len=MAX_LENGTH,
        prefix_reuse=False,
        speculate="lookup",
        local_layers="none",
    )
    async with open_coordinator(settings) as coordinator:
        with TorchThread() as thread:
            small = None
            if told["model"] == str(embedded_model_path()):  # else it has other tokens
                small = await trio.to_thread.run_sync(
                    DraftModel.load, embedded_model_path(), coordinator.model, thread
                )
            for number in range(told["rounds"] + 1):
                for text in texts(told["tokens"]):
                    is_asked_for = told["texts"] is None or text.name in told["texts"]
                    if not is_asked_for or (text.drafted and small is None):
                        continue
                    for length in _in_turn(number):
                        run = await write(coordinator, text, told["tokens"], length, small)
                        if number:  # the first warms up
                            writes.setdefault(text.name, {}).setdefault(str(length), []).append(run)
    print(json.dumps(writes))


async def write(
    coordinator: Coordinator, text: Text, num_tokens: int, length: int, small: DraftModel | None
) -> dict[str, float]:
    speculation.MAX_PROPOSED = length  # type: ignore[misc]
    its = coordinator._speculation
    assert its is not None
    its._drafts = None
    if text.drafted and small is not None:
        assert text.tokens is not None
        GivenDraft.text = [*text.prompt, *text.tokens]
        its._drafts = Drafts(small)
    Given.text = text.tokens
    before = coordinator.status()
    times: list[float] = []
    tokens = coordinator.generate_tokens(
        text.prompt, max_tokens=num_tokens, ignore_eos=True, speculate=length > 0
    )
    async with aclosing(tokens) as generating:
        async for _ in generating:
            times.append(time.perf_counter())
    after = coordinator.status()
    return {
        "seconds": times[-1] - times[0],
        "tokens": len(times) - 1,
        "proposed": after.num_proposed - before.num_proposed,
        "accepted": after.num_accepted - before.num_accepted,
    }


class Drafts:
    """Drafts that are right as often as they are to be."""

    def __init__(self, small: DraftModel) -> None:
        self._small = small

    def draft(self, pace: Any) -> Draft:
        return GivenDraft(self._small, pace)


if __name__ == "__main__":
    main()
