"""What is wrong with ports, numbers, keys and models is told before torch is loaded, and mostly before libp2p is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from neurogrid.assembly.plan_request import PlanRequest
from neurogrid.errors import ConfigurationError
from neurogrid.model.files.checkpoint_files import judge_checkpoint
from neurogrid.p2p import Identity
from neurogrid.server.http.listeners import check_port, open_listeners

HOST = "127.0.0.1"
# Runs the commands, a list of lists in JSON, in one process; prints their statuses and what they have imported.
PROGRAM = """
import json, sys
from neurogrid.cli.commands import coordinator
from neurogrid.cli.commands import main
from neurogrid.cli.commands import worker
mains = {"neurogrid": main.main, "neurogrid-coordinator": coordinator.main, "neurogrid-worker": worker.main}
statuses = [mains[name](words) for name, *words in json.loads(sys.argv[1])]
print(json.dumps([statuses, sorted({"torch", "transformers", "libp2p"} & set(sys.modules))]))
"""


def check(*told: tuple[str, str], failing: int = 0, imports: tuple[str, ...] = ()) -> None:
    """Run command lines; each says its line, the last of all, and what is named is all that was imported for it.

    The last `failing` of them end with 1, the others with 2.
    """
    commands = [line.split() for line, _ in told]
    statuses = [2] * (len(told) - failing) + [1] * failing
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [statuses, list(imports)], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(told), lines
    for line, (command, says) in zip(lines, told, strict=True):
        assert line.startswith("neurogrid"), line
        assert says in line, command


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_ports_numbers_and_models(taken_port: int, tmp_path: Path) -> None:
    says = f"port {taken_port} of {HOST} is taken: --http-port N chooses another, 0 a free one"
    model, broken = tmp_path / "model", tmp_path / "broken"
    for folder, config in ((model, '{"num_hidden_layers": 3}'), (broken, "{")):
        folder.mkdir()
        (folder / "config.json").write_text(config)
    (model / "model.safetensors").touch()
    worker_says = says.replace("--http", "--metrics")
    check(
        (f"neurogrid serve --http-port {taken_port}", says),
        (f"neurogrid-coordinator --http-port {taken_port} --min-peers 1", says),
        (f"neurogrid-worker --port 0 --metrics-port {taken_port}", worker_says),
        (
            "neurogrid serve --http-host 192.0.2.1 --insecure",
            "cannot listen on 192.0.2.1, port 8090",
        ),
        (
            "neurogrid-worker --metrics-host nobody.invalid --metrics-port 0",
            "--metrics-host nobody",
        ),
        # Numbers that no worker and no model can keep to.
        ("neurogrid-coordinator --prompt x", "there is no worker to run on: name some with --peer"),
        ("neurogrid plan --stages 9 --min-peers 2", "--stages 9 takes as many workers, and 2 will"),
        (
            "neurogrid chat --stages 2 --insecure --p2p-port 0",
            "--stages 2 takes as many workers, and 1",
        ),
        ("neurogrid run x --stages 9 --min-peers 9", "9 stages (--stages, or one for each local"),
        ("neurogrid serve --http-port 0 --local-workers 9", "more than the 8 layers of embedded"),
        ("neurogrid run x --local-layers 9", "--local-layers 9: embedded has 8 layers"),
        (f"neurogrid plan {model} --local-layers 4", f"4: {model.name} has 3 layers"),
        # A model that is none, or a worker's own.
        ("neurogrid chat ./Model-8B", "chat: the model directory Model-8B does not exist"),
        ("neurogrid run x --temperature -1", "run: --temperature must be a number from 0"),
        (
            "neurogrid-worker --port 0 --model Org/Model-8B --offline",
            "and --offline forbids to ask a hub for it",
        ),
        (
            f"neurogrid-worker --port 0 --model {model / 'config.json'}",
            "is a file, not a directory",
        ),
        (f"neurogrid-worker --port 0 --model {broken}", "not valid JSON"),
        failing=1,
    )


def test_identities_and_named_workers(tmp_path: Path) -> None:
    key, cluster = tmp_path / "identity.key", tmp_path / "cluster"
    key.write_bytes(b"\x08\x01\x12\x40")
    key.chmod(0o600)
    says = f"{key} is not an identity file"
    peer = "/p2p/12D3KooWGRUPGPvcvyhCwDCZ8oMZjXtKL4GmFzq6v8fSZ1T4bXhN"
    peers = f"--peer /ip4/127.0.0.1/tcp/1{peer} --peer /ip4/127.0.0.1/udp/1/quic-v1{peer}"
    listen = "--listen /ip4/127.0.0.1/tcp/0"
    check(
        (f"neurogrid serve --http-port 0 {listen} --min-peers 1 --identity {key}", says),
        (f"neurogrid plan {listen} --min-peers 1 --identity {key}", says),
        (
            f"neurogrid run x --p2p-port 0 --new-cluster {cluster} --min-peers 1 --identity {key}",
            says,
        ),
        (f"neurogrid diagnose {listen} --identity {key}", says),
        (f"neurogrid-worker {listen} --identity {key}", says),
        (f"neurogrid-worker {listen} --identity {tmp_path}", "cannot use the identity file"),
        # It is the same one twice.
        (
            f"neurogrid run x {peers} --stages 2",
            "--stages 2 takes as many workers, and 1 will be waited for",
        ),
        imports=("libp2p",),
    )
    assert not cluster.exists()


def test_an_identity_that_is_read_is_not_made(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    assert Identity.read(key) is None
    assert not key.exists()
    made = Identity.load(key)
    assert Identity.read(key) == made


async def test_a_port_is_tried_as_it_is_opened(taken_port: int) -> None:
    (listener,) = await open_listeners(HOST, 0)
    port = listener.socket.getsockname()[1]
    for taken in (port, taken_port):
        for attempt in (check_port, open_listeners):
            with pytest.raises(ConfigurationError, match=f"port {taken} of {HOST} is taken"):
                await attempt(HOST, taken)
    await listener.aclose()
    await check_port(HOST, port)
    await check_port(HOST, 0)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, None),
        ({"n_layer": 2}, None),
        ({"num_hidden_layers": 2}, 2),
        ({"num_hidden_layers": "2"}, None),
        ({"num_hidden_layers": True}, None),
        ({"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 9}}, 3),
        ({"text_config": {"num_hidden_layers": 3}, "num_hidden_layers": 4}, 4),
    ],
)
def test_the_layers_that_a_config_names(
    config: dict[str, object], layers: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert judge_checkpoint(tmp_path) == layers


REQUEST = PlanRequest(
    num_named=0, local_workers=0, is_looking=False, min_peers=None, local_layers="auto", stages=None
)


@pytest.mark.parametrize(
    ("changes", "awaited", "stages"),
    [
        ({"num_named": 2, "local_workers": 1}, 3, 1),
        ({"local_workers": 2, "local_layers": 1}, 2, 3),
        ({"is_looking": True}, 1, None),
        ({"is_looking": True, "num_named": 2}, 2, None),
        ({"min_peers": 4, "num_named": 2, "stages": 3}, 4, 3),
        ({"local_layers": 2, "stages": 1}, 0, 1),
        ({"min_peers": 0}, 0, None),
    ],
)
def test_what_can_come_true(changes: dict[str, object], awaited: int, stages: int | None) -> None:
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]
    request.check_workers()
    assert (request.num_awaited, request.num_stages) == (awaited, stages)
    request.check_layers(3, "m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "there is no worker"),
        ({"local_layers": "none", "min_peers": 0}, "there is no worker"),
        ({"num_named": 1, "stages": 2}, "--stages 2 takes as many workers, and 1 will"),
        ({"num_named": 1, "stages": 3, "local_layers": 1}, "--stages 3 takes as many"),
        ({"num_named": 4, "stages": 4}, "4 stages .* the 3 layers of m: ask for at most 3"),
        ({"local_workers": 3, "local_layers": 1}, "4 stages .* are more than the 3 layers"),
        ({"num_named": 1, "local_layers": 4}, "--local-layers 4: m has 3 layers"),
    ],
)
def test_what_cannot_come_true(changes: dict[str, object], says: str) -> None:
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]

    def check_all() -> None:
        request.check_workers()
        request.check_layers(3, "m")

    with pytest.raises(ConfigurationError, match=says):
        check_all()
