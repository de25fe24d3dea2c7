"""Imports point down only: the table of layers, held for every import statement in the package."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "neurogrid"


@dataclass(frozen=True)
class Room:
    """What the modules below `prefix` may import: rooms of its own floor that stand before it in the house, and these.

    Attributes:
        floors: what it may import of other floors, by prefix.
        outside: top-level packages of others.
        not_standard: modules of the standard library that it must not import all the same.
    """

    prefix: str
    floors: frozenset[str]
    outside: frozenset[str] = frozenset()
    not_standard: frozenset[str] = frozenset({"pickle", "shelve", "marshal", "asyncio"})

    @property
    def floor(self) -> str:
        return ".".join(self.prefix.split(".")[:2])


TRANSPORT = frozenset(
    {
        "libp2p",
        "multiaddr",
        "trio",
        "msgpack",
        "zeroconf",
        "ifaddr",
        "miniupnpc",
        "opentelemetry",
        "cryptography",
        "qh3",
        "google",
    }
)
TORCH = frozenset(
    {"torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy"}
)
COMMON = frozenset(
    {
        "neurogrid.errors",
        "neurogrid.exception_groups",
        "neurogrid.fork_server",
        "neurogrid.renewed_event",
        "neurogrid.temporary",
    }
)
COMMAND_LINE = frozenset({"argparse", "http", "pickle", "shelve", "marshal", "asyncio"})
CODEC = frozenset({"msgpack", "blake3"})
SERVICES = frozenset({"trio", "multiaddr", "torch", "opentelemetry"})
BELOW_NODE = COMMON | {"neurogrid.planner", "neurogrid.p2p", "neurogrid.model"}
BELOW_FLEET = BELOW_NODE | {"neurogrid.node"}
BELOW_INFERENCE = BELOW_FLEET | {"neurogrid.fleet", "neurogrid.worker"}
BELOW_TELEMETRY = BELOW_INFERENCE | {"neurogrid.inference", "neurogrid.assembly"}
BELOW_SERVER = BELOW_TELEMETRY | {
    "neurogrid.telemetry",
    "neurogrid.training",
    "neurogrid.extras",
    "neurogrid.__version__",
}
SERVER = frozenset(
    {"trio", "starlette", "hypercorn", "h11", "prometheus_client", "opentelemetry", "jinja2"}
)


def transport(name: str, *, outside: frozenset[str] = TRANSPORT) -> Room:
    return Room(f"neurogrid.p2p{name}", COMMON, outside, COMMAND_LINE)


def model(name: str, *, outside: frozenset[str] = TORCH) -> Room:
    return Room(f"neurogrid.model{name}", COMMON | {"neurogrid.p2p.wire"}, outside, COMMAND_LINE)


def service(name: str, floors: frozenset[str]) -> Room:
    return Room(f"neurogrid.{name}", floors, SERVICES, COMMAND_LINE)


def training(name: str, outside: frozenset[str] = SERVICES | TORCH) -> Room:
    return Room(f"neurogrid.training{name}", COMMON | {"neurogrid.p2p"}, outside, COMMAND_LINE)


def server(name: str) -> Room:
    return Room(f"neurogrid.server{name}", BELOW_SERVER, SERVER)


def command_line(name: str) -> Room:
    # trio_typing: the stubs that come with libp2p hide trio's own types from mypy.
    outside = frozenset({"trio", "trio_typing", "multiaddr", "rich", "shtab"})
    return Room(
        f"neurogrid.cli{name}",
        BELOW_SERVER | {"neurogrid.server", "neurogrid.hub"},
        outside,
    )


# From below. The narrowest prefix holds.
HOUSE = (
    Room("neurogrid.errors", frozenset()),
    Room("neurogrid.extras", frozenset()),
    Room("neurogrid.temporary", frozenset()),
    # It looks whether torch is there, and imports nothing but what it is told.
    Room("neurogrid.fork_server", frozenset()),
    Room("neurogrid.renewed_event", frozenset(), frozenset({"trio"})),
    Room("neurogrid.exception_groups", frozenset({"neurogrid.errors"}), frozenset({"trio"})),
    # It knows nobody.
    Room("neurogrid.planner", frozenset({"neurogrid.errors"})),
    Room("neurogrid.p2p.wire", frozenset({"neurogrid.errors"}), CODEC, COMMAND_LINE),
    transport(".shares", outside=frozenset()),
    transport(".peer_log", outside=frozenset({"trio"})),
    # The path of every byte: below streams and hosts, and above nothing of ours but what takes the bytes.
    transport(".streams.intake", outside=frozenset()),
    transport(".link"),
    transport(".streams"),
    transport(".trust"),
    transport(".hosts"),
    transport(".exchange"),
    # On top of an exchange: names for its messages, and 1.0.0 besides. Only what puts peers together knows it.
    transport(".tensor"),
    transport(".quic"),
    transport(".memory"),
    transport(".libp2p"),
    transport(".transfer"),
    transport(".discovery"),
    transport(".reach"),
    transport(".transport"),
    transport(""),
    transport(".blocking"),
    model(".confined"),
    model(".unused_memory"),
    # Triton where torch brings it along.
    model(".kernels", outside=TORCH | {"triton"}),
    model(".files"),
    # Imports llguidance when a grammar is compiled.
    model(".grammars", outside=TORCH | {"llguidance"}),
    model(".images", outside=TORCH | {"PIL"}),
    model(".adapters"),
    model(".caches"),
    model(".stages"),
    model(".proof"),
    model(".embedded"),
    model(""),
    # Goes to the network for what somebody typed; the process that does is its own.
    Room(
        "neurogrid.hub",
        COMMON | {"neurogrid.planner", "neurogrid.model", "neurogrid.__version__"},
        frozenset({"huggingface_hub", "httpx2", "trio"}),
        COMMAND_LINE,
    ),
    service("node", BELOW_NODE),
    service("fleet", BELOW_FLEET),
    service("fleet.speeds", BELOW_FLEET),
    service("fleet.board", BELOW_FLEET),
    service("fleet.placing", BELOW_FLEET),
    # Pure: no clock, no torch, no socket.
    Room("neurogrid.worker.room", frozenset({"neurogrid.errors"})),
    Room("neurogrid.worker.claim", frozenset()),
    service("worker", BELOW_FLEET),
    # Pure: no clock, no socket, no torch. Which of several models are open.
    Room("neurogrid.inference.residency", frozenset()),
    service("inference.pipeline", BELOW_INFERENCE),
    service("inference.board", BELOW_INFERENCE),
    service("inference.speculation", BELOW_INFERENCE),
    service("inference.verification", BELOW_INFERENCE),
    service("inference.generation", BELOW_INFERENCE),
    # A worker's side, which the coordinator's does not import.
    service("inference.sessions", BELOW_INFERENCE),
    service("inference", BELOW_INFERENCE),
    service("assembly", BELOW_INFERENCE | {"neurogrid.inference", "neurogrid.training"}),
    # Beside serving: neither imports the other.
    # Knows neither peers nor time: averaging is handed to it.
    Room(
        "neurogrid.training.optimizers",
        frozenset({"neurogrid.errors"}),
        frozenset({"torch", "transformers", "numpy"}),
        COMMAND_LINE,
    ),
    # Pure: no clock, no file, no torch. What a run is to do, and what that takes.
    Room("neurogrid.training.runs.run_file", frozenset({"neurogrid.errors"})),
    Room("neurogrid.training.runs.estimate", frozenset({"neurogrid.errors"})),
    training(".runs.run_directory", frozenset()),
    training(".wire", frozenset()),
    training(".averaging.plan", frozenset()),
    training(".averaging.shares", frozenset()),
    training(".averaging.codecs", frozenset({"torch", "numpy"})),
    training(".averaging.aggregators", frozenset({"torch", "numpy"})),
    training(".averaging.parts", frozenset({"torch", "numpy"})),
    # Carries a plan out, whoever made it.
    training(".averaging.reductions", frozenset({"trio", "torch", "blake3"})),
    # Pure: no clock, no socket, no torch.
    training(".averaging.rounds", frozenset()),
    training(".averaging.groups", frozenset({"trio", "torch", "blake3"})),
    training(".averaging"),
    # Pure, but for what reads and writes slices.
    training(".data.spans", frozenset()),
    training(".data.takers", frozenset()),
    training(".data.epoch", frozenset()),
    training(".data.dealing", frozenset()),
    training(".data.manifest", frozenset()),
    training(".data.evaluating", frozenset()),
    training(".data.slices", frozenset({"torch", "safetensors"})),
    # Goes to the network for what a run file names.
    training(".data.web", frozenset({"trio", "httpx2"})),
    training(".data.slice_file", frozenset()),
    training(".data.own_slices", frozenset({"trio"})),
    training(".data.blobs", frozenset({"trio"})),
    training(".data.handing_on", frozenset({"trio"})),
    training(".data.blob_files", frozenset({"trio"})),
    training(".data.preparing", TORCH | {"pyarrow", "PIL"}),
    training(".data"),
    # What a trainer is told, and the optimiser that it makes of it.
    training(".runs.trainer_settings", frozenset()),
    training(".runs.inner_optimizer", frozenset({"torch"})),
    # Pure: no clock, no socket, no torch. Runs whose members witness what the others did.
    training(".witnessed.results", frozenset({"numpy"})),
    training(".witnessed", frozenset()),
    # A child process and its owner; of peers it knows nothing.
    Room(
        "neurogrid.training.trainer",
        COMMON | {"neurogrid.model"},
        TORCH | {"trio", "msgpack"},
        COMMAND_LINE,
    ),
    # Pure: no clock, no socket, no torch.
    training(".stages.schedule", frozenset()),
    # Pure: where a model is cut, and what that takes.
    training(".stages.cutting", frozenset()),
    training(".stages.chain_estimate", frozenset()),
    # Pure: who is where, and which way micro-batches go.
    training(".stages.placement", frozenset()),
    training(".stages.routing", frozenset()),
    training(".stages.holdings", frozenset()),
    # Pure: what the learner of a stage is told.
    training(".stages.stage_settings", frozenset()),
    # Layers and their optimiser; of peers they know nothing.
    training(".stages.stage_sums", frozenset({"torch"})),
    training(".stages.outer_steps", frozenset({"torch"})),
    Room(
        "neurogrid.training.stages.lora",
        COMMON | {"neurogrid.model"},
        frozenset({"torch", "safetensors", "peft"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.stages.stage_learner",
        COMMON | {"neurogrid.model"},
        frozenset({"torch"}),
        COMMAND_LINE,
    ),
    # A child process and its owner, as a trainer is.
    training(".stages.tensor_frames", frozenset({"torch"})),
    Room(
        "neurogrid.training.stages.weight_files",
        COMMON | {"neurogrid.model"},
        frozenset({"torch"}),
        COMMAND_LINE,
    ),
    training(".stages.stage_program", frozenset({"torch", "safetensors"})),
    training(".stages.stage_process", frozenset({"trio", "torch"})),
    training(".stages", frozenset()),
    Room(
        "neurogrid.training.checkpoints",
        COMMON | {"neurogrid.model"},
        frozenset({"trio", "torch", "transformers", "safetensors"}),
        COMMAND_LINE,
    ),
    # Pure: no clock, no socket, no torch. Records are signed.
    training(".joining", frozenset({"cryptography"})),
    # What a run is, without its network: no clock, no socket, no torch.
    training(".runs.projection", frozenset()),
    training(".runs.resources", frozenset()),
    training(".runs.entries", frozenset()),
    training(".runs.changes", frozenset()),
    training(".runs.alarms", frozenset()),
    training(".runs.learning", frozenset()),
    training(".runs.tracker", frozenset()),
    training(".runs.state", frozenset()),
    # Pure: who may lead.
    training(".runs.terms", frozenset()),
    # A file on the disk.
    training(".runs.journal", frozenset({"cryptography"})),
    training(".runs.signatures", frozenset({"cryptography"})),
    training(".runs.weight_pieces", frozenset({"torch"})),
    training(".runs.audit", frozenset()),
    training(".runs.verdict", frozenset()),
    training(".runs.machine", frozenset()),
    training(".runs.witnessed_machine", frozenset()),
    training(".runs.outer_state", frozenset({"torch", "blake3"})),
    training(".runs.common_steps", frozenset({"torch", "blake3"})),
    training(".runs.methods", frozenset({"torch"})),
    training(".runs.trainers", frozenset()),
    training(".runs", frozenset()),
    # Pure: no clock, no socket, no torch. What members claim, who looks at it, and what shows that it is false.
    training(".checks.signed", frozenset({"cryptography"})),
    training(".checks.claims", frozenset()),
    training(".checks.drawing", frozenset()),
    training(".checks.band", frozenset()),
    training(".checks.ledger", frozenset()),
    training(".checks.evidence", frozenset()),
    training(".checks.verdicts", frozenset()),
    training(".checks.epoch_proofs", frozenset()),
    training(".checks.cases", frozenset()),
    training(".checks.round_claims", frozenset()),
    training(".checks.plausibility", frozenset()),
    # The same on tensors.
    training(".checks", frozenset({"torch"})),
    # A worker's side and a leader's side of a run, which do not know each other.
    Room(
        "neurogrid.training.members",
        COMMON | {"neurogrid.p2p", "neurogrid.node", "neurogrid.__version__"},
        frozenset({"trio", "torch", "safetensors"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.leading.settings",
        COMMON | {"neurogrid.p2p", "neurogrid.node"},
        frozenset(),
        COMMAND_LINE,
    ),
    training(".leading.progress", frozenset()),
    # Trackers, by whoever knows them all.
    Room(
        "neurogrid.training.leading.tracking",
        COMMON | {"neurogrid.p2p", "neurogrid.node"},
        frozenset({"trio", "accelerate"}),
        COMMAND_LINE,
    ),
    training(".leading.model_numbers", frozenset({"torch", "transformers", "huggingface_hub"})),
    training(".leading.round_figures", frozenset()),
    training(".leading.changes", frozenset()),
    training(".leading.chains.state", frozenset({"trio"})),
    training(".leading.chains.step_deadline", frozenset()),
    training(".leading.witnessed.agreement", frozenset()),
    # What stages begin with, and what becomes of what they have learned: models in files.
    Room(
        "neurogrid.training.leading.chains.weights",
        COMMON | {"neurogrid.p2p", "neurogrid.model"},
        frozenset({"torch"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.leading.chains.model_files",
        COMMON | {"neurogrid.model"},
        frozenset({"torch", "safetensors"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.leading.chains.keeper",
        COMMON | {"neurogrid.p2p", "neurogrid.node", "neurogrid.model"},
        frozenset({"trio", "torch", "safetensors"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.leading.chains.numbers",
        COMMON | {"neurogrid.model"},
        frozenset({"torch"}),
        COMMAND_LINE,
    ),
    Room(
        "neurogrid.training.leading",
        COMMON | {"neurogrid.p2p", "neurogrid.node", "neurogrid.fleet", "neurogrid.model"},
        frozenset({"trio", "torch"}),
        COMMAND_LINE,
    ),
    # Processes of this machine, by their command lines; what came of them, by their files.
    training(".testnet.plan", frozenset()),
    training(".testnet.links", frozenset()),
    training(".testnet.forwarder", frozenset()),
    training(".testnet.network", frozenset({"trio"})),
    training(".testnet.processes", frozenset({"trio"})),
    training(".testnet.report", frozenset()),
    training(".testnet", frozenset({"trio"})),
    # A loop of one's own: groups, optimisers and a model in one.
    training(".loops", frozenset({"trio", "torch"})),
    training(".loops.trainer_callback", frozenset({"torch", "transformers"})),
    training(".distributed.posts", frozenset()),
    training(".distributed.chunks", frozenset()),
    training(".distributed"),
    training(""),
    # Reads what is there when somebody asks: above what it looks at, below what serves it.
    Room(
        "neurogrid.telemetry",
        BELOW_TELEMETRY | {"neurogrid.training", "neurogrid.__version__"},
        frozenset({"prometheus_client", "opentelemetry", "torch"}),
        COMMAND_LINE,
    ),
    server(".errors"),
    server(".additions"),
    server(".schema_check"),
    server(".http"),
    server(".backend"),
    server(".models"),
    server(".openapi"),
    server(".openai"),
    server(".ollama"),
    server(".llama_cpp"),
    server(".cluster"),
    server(".page"),
    server(".training"),
    server(""),
    command_line(".signals"),
    command_line(".terminal"),
    command_line(".libraries"),
    command_line(".entry"),
    command_line(".options"),
    command_line(".commands"),
    # The facade without async, which runs in a thread what is below.
    Room("neurogrid.blocking", BELOW_TELEMETRY, frozenset({"torch"})),
    # The facade names what is above it, and imports it when it is asked for.
    Room("neurogrid", frozenset({"neurogrid"})),
)


def module_name(file: Path, root: Path = PACKAGE) -> str:
    parts = [root.name, *file.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Every module that `source` imports, at the top, in functions and for type checkers alike."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from neurogrid import cli` imports neurogrid.cli; a class is named with its module.
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def room_of(module: str) -> int:
    """Where in the house a module stands."""
    return max(
        (len(room.prefix), number)
        for number, room in enumerate(HOUSE)
        if is_below(module, room.prefix)
    )[1]


def is_allowed(name: str, module: str) -> bool:
    """Whether `module` may import `name`, both of ours."""
    importer, number = HOUSE[room_of(module)], room_of(name)
    if any(is_below(name, prefix) for prefix in importer.floors):
        return True
    if importer.floor == "neurogrid" or HOUSE[number].floor != importer.floor:
        return False
    return number <= room_of(module)


@cache
def imports_by_module() -> dict[str, tuple[str, ...]]:
    """What each of our modules imports: every source is parsed once for all tests."""
    return {
        module_name(file): tuple(
            imports_of(
                file.read_text(encoding="utf-8"),
                module_name(file),
                is_package=file.name == "__init__.py",
            )
        )
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def faults(names: Iterable[str], module: str) -> list[str]:
    room = HOUSE[room_of(module)]
    found = []
    for name in names:
        top = name.partition(".")[0]
        if top == "neurogrid":
            allowed = is_allowed(name, module)
        elif top == "cmd":
            allowed = False  # the standard module or our scripts: neither is wanted
        elif top in sys.stdlib_module_names:
            allowed = top not in room.not_standard
        else:
            allowed = top in room.outside
        if not allowed:
            found.append(f"{module} imports {name}")
    return found


def test_every_import_points_down() -> None:
    assert len(imports_by_module()) > 20
    found = set()
    for module, names in imports_by_module().items():
        found |= set(faults(names, module))
    assert found == set()


def test_versions_are_known_where_peers_are_put_together_and_in_their_adapters() -> None:
    """On the way of 1.1.0 nothing asks which version a peer speaks."""
    knowing = {
        module
        for module, names in imports_by_module().items()
        if any(is_below(name, "neurogrid.p2p.tensor") for name in names)
    }
    inside = {
        m for m in knowing if is_below(m, "neurogrid.p2p") or is_below(m, "neurogrid.assembly")
    }
    assert knowing - inside == {"neurogrid.inference.sessions.worker_v10"}


def test_nothing_above_the_commands() -> None:
    for module, names in imports_by_module().items():
        if not is_below(module, "neurogrid.cli"):
            assert not [name for name in names if is_below(name, "neurogrid.cli")], module


def test_scripts_are_flat() -> None:
    scripts = PACKAGE.parent / "cmd"
    assert not (scripts / "__init__.py").exists()


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch", "neurogrid.p2p.wire.types"),
        ("import trio", "neurogrid.p2p.wire.types"),
        ("from neurogrid.p2p.hosts.host import Host", "neurogrid.p2p.wire.types"),
        ("from ..host import Host", "neurogrid.p2p.wire.types"),
        ("from .. import host", "neurogrid.p2p.wire.types"),
        ("from neurogrid.exception_groups import unwrap_errors", "neurogrid.p2p.wire.types"),
        ("def f():\n    import numpy as np", "neurogrid.p2p.tensor.protocol"),
        ("from neurogrid.model import config", "neurogrid.p2p.tensor.protocol"),
        ("from neurogrid import model", "neurogrid.p2p.tensor.protocol"),
        ("import trio.lowlevel", "neurogrid.model.stages.stage"),
        ("from libp2p.host import basic_host", "neurogrid.model.stages.stage"),
        ("from neurogrid.p2p import Protocol", "neurogrid.model.stages.stage"),
        ("from neurogrid.p2p.streams.stream import Stream", "neurogrid.p2p.link.link_stream"),
        ("import pickle", "neurogrid.model.files.checkpoint"),
        ("import argparse", "neurogrid.assembly.worker"),
        ("import rich.progress", "neurogrid.assembly.worker"),
        ("from neurogrid.fleet.progress import WorkerInfo", "neurogrid.planner.plan"),
        ("from transformers import AutoConfig", "neurogrid.assembly.worker"),
        ("from neurogrid.cli import common", "neurogrid.assembly.worker"),
        ("from cmd import neurogrid_worker", "neurogrid.cli.commands.worker"),
        ("import torch", "neurogrid.cli.commands.worker"),
        ("import torch", "neurogrid"),
    ],
)
def test_the_check_finds(source: str, module: str) -> None:
    assert len(faults(imports_of(source, module, is_package=False), module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from neurogrid.p2p.wire import ModelConfig", "neurogrid.model.files.config"),
        ("from .headers import Header\nimport json, msgpack", "neurogrid.p2p.wire.types"),
        ("import torch\nfrom neurogrid.model import stage", "neurogrid.assembly.worker"),
    ],
)
def test_the_check_lets_pass(source: str, module: str) -> None:
    assert faults(imports_of(source, module, is_package=False), module) == []


def loaded_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in run.stdout.split()}


def test_the_transport_runs_without_torch() -> None:
    assert not TORCH & loaded_after("from neurogrid.p2p import *")
    assert "libp2p" not in loaded_after("from neurogrid.p2p import MessageDecoder, TensorMessage")
    assert not (TORCH | TRANSPORT) & loaded_after("import neurogrid")
