"""Imports point down only: the table of layers, held for every import statement in the package."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "neurogrid"


@dataclass(frozen=True)
class Layer:
    """What modules below `prefix` may import besides the standard library.

    Attributes:
        own: packages of ours, by prefix.
        outside: top-level packages of others.
        not_standard: modules of the standard library that it must not import all the same.
    """

    prefix: str
    own: frozenset[str]
    outside: frozenset[str] = frozenset()
    not_standard: frozenset[str] = frozenset({"pickle", "shelve", "marshal", "asyncio"})


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
COMMON = frozenset({"neurogrid.errors", "neurogrid.exception_groups", "neurogrid.temporary"})
COMMAND_LINE = frozenset({"argparse", "http", "pickle", "shelve", "marshal", "asyncio"})

# The first prefix that matches holds, so the narrower stands before the wider.
LAYERS = (
    Layer("neurogrid.errors", frozenset()),
    Layer("neurogrid.extras", frozenset()),
    Layer("neurogrid.temporary", frozenset()),
    Layer("neurogrid.exception_groups", frozenset({"neurogrid.errors"}), frozenset({"trio"})),
    Layer(
        "neurogrid.p2p.wire",
        frozenset({"neurogrid.errors", "neurogrid.p2p.wire"}),
        frozenset({"msgpack", "blake3"}),
        COMMAND_LINE,
    ),
    Layer("neurogrid.p2p.streams.intake", frozenset()),
    # The path of every byte: below streams and hosts, and above nothing of ours but who takes the bytes.
    Layer(
        "neurogrid.p2p.link",
        frozenset({"neurogrid.errors", "neurogrid.p2p.streams.intake", "neurogrid.p2p.link"}),
        frozenset({"libp2p", "multiaddr", "trio", "cryptography"}),
        COMMAND_LINE,
    ),
    Layer("neurogrid.p2p", COMMON | {"neurogrid.p2p"}, TRANSPORT, COMMAND_LINE),
    # The training script of the embedded model is a command of its own.
    Layer("neurogrid.model.embedded.train", frozenset({"neurogrid.model.embedded"}), TORCH),
    Layer(
        "neurogrid.model",
        COMMON | {"neurogrid.model", "neurogrid.p2p.wire"},
        TORCH,
        COMMAND_LINE,
    ),
    # Who computes which layers: it knows nobody.
    Layer("neurogrid.planner", frozenset({"neurogrid.errors", "neurogrid.planner"})),
    Layer(
        "neurogrid.inference",
        COMMON | {"neurogrid.planner", "neurogrid.p2p", "neurogrid.model", "neurogrid.inference"},
        frozenset({"trio", "multiaddr", "torch", "opentelemetry"}),
        COMMAND_LINE,
    ),
    # Reads what is there when somebody asks: above what it looks at, below who serves it.
    Layer(
        "neurogrid.telemetry",
        COMMON
        | {
            "neurogrid.__version__",
            "neurogrid.planner",
            "neurogrid.p2p",
            "neurogrid.inference",
            "neurogrid.telemetry",
        },
        frozenset({"prometheus_client", "opentelemetry", "torch"}),
        COMMAND_LINE,
    ),
    Layer(
        "neurogrid.server",
        frozenset({"neurogrid"}),
        frozenset(
            {
                "trio",
                "starlette",
                "hypercorn",
                "h11",
                "prometheus_client",
                "opentelemetry",
                "jinja2",
            }
        ),
    ),
    Layer(
        "neurogrid.cli",
        frozenset({"neurogrid"}),
        # trio_typing: the stubs that come with libp2p hide trio's own types from mypy.
        frozenset({"trio", "trio_typing", "multiaddr", "rich", "shtab"}),
    ),
    # The facade without async, which runs in a thread what is below.
    Layer(
        "neurogrid.blocking",
        frozenset({"neurogrid.planner", "neurogrid.inference", "neurogrid.model", "neurogrid.p2p"}),
        frozenset({"torch"}),
    ),
    # The facade names what is above it, and imports it when it is asked for.
    Layer("neurogrid", frozenset({"neurogrid.inference", "neurogrid.errors", "neurogrid.extras"})),
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


def faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    layer = next(layer for layer in LAYERS if is_below(module, layer.prefix))
    found = []
    for name in imports_of(source, module, is_package=is_package):
        top = name.partition(".")[0]
        if top == "neurogrid":
            allowed = any(is_below(name, prefix) for prefix in layer.own)
        elif top == "cmd":
            allowed = False  # the standard module or our scripts: neither is wanted
        elif top in sys.stdlib_module_names:
            allowed = top not in layer.not_standard
        else:
            allowed = top in layer.outside
        if not allowed:
            found.append(f"{module} ({layer.prefix}) imports {name}")
    return found


def test_every_import_points_down() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    found = []
    for file in files:
        is_package = file.name == "__init__.py"
        found += faults(file.read_text(encoding="utf-8"), module_name(file), is_package=is_package)
    assert found == []


def test_nothing_above_the_commands() -> None:
    for file in PACKAGE.rglob("*.py"):
        module = module_name(file)
        if not is_below(module, "neurogrid.cli"):
            names = imports_of(
                file.read_text(encoding="utf-8"), module, is_package=file.name == "__init__.py"
            )
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
        ("def f():\n    import numpy as np", "neurogrid.p2p.exchange.protocol"),
        ("from neurogrid.model import config", "neurogrid.p2p.exchange.protocol"),
        ("from neurogrid import model", "neurogrid.p2p.exchange.protocol"),
        ("import trio.lowlevel", "neurogrid.model.stages.stage"),
        ("from libp2p.host import basic_host", "neurogrid.model.stages.stage"),
        ("from neurogrid.p2p import Protocol", "neurogrid.model.stages.stage"),
        ("from neurogrid.p2p.streams.stream import Stream", "neurogrid.p2p.link.stream"),
        ("import pickle", "neurogrid.model.files.checkpoint"),
        ("import argparse", "neurogrid.assembly.worker"),
        ("import rich.progress", "neurogrid.assembly.worker"),
        ("from neurogrid.fleet.progress import WorkerInfo", "neurogrid.planner.plan"),
        ("from transformers import AutoConfig", "neurogrid.assembly.worker"),
        ("from neurogrid.cli import common", "neurogrid.assembly.worker"),
        ("from cmd import neurogrid_worker", "neurogrid.cli.worker"),
        ("import torch", "neurogrid.cli.worker"),
        ("import torch", "neurogrid"),
    ],
)
def test_the_check_finds(source: str, module: str) -> None:
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from neurogrid.p2p.wire import ModelConfig", "neurogrid.model.files.config"),
        ("from .headers import Header\nimport json, msgpack", "neurogrid.p2p.wire.types"),
        ("import torch\nfrom neurogrid.model import stage", "neurogrid.assembly.worker"),
    ],
)
def test_the_check_lets_pass(source: str, module: str) -> None:
    assert faults(source, module) == []


def loaded_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in run.stdout.split()}


def test_the_transport_runs_without_torch() -> None:
    assert not TORCH & loaded_after("import neurogrid.p2p")
    assert not (TORCH | TRANSPORT) & loaded_after("import neurogrid")
