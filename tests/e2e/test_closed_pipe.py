"""Commands whose reader has gone (`neurogrid-coordinator --help | head -1`): no traceback, and the usual status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neurogrid.cli.options.trust import IDENTITY_FILE
from neurogrid.cli.terminal.closed_pipe import PIPE_STATUS
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import Cluster
from tests.e2e.support import DEADLINE, ENVIRONMENT, WorkerProcess

HERE = ("--listen", "/ip4/127.0.0.1/tcp/0")


def run_unread(command: str, *args: str) -> tuple[int, str]:
    """Run it with a stdout that nobody reads any more; its status and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", f"neurogrid.cli.commands.{command}", *args],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            timeout=DEADLINE,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["coordinator", "worker"])
@pytest.mark.parametrize("args", [("--help",), ("--print-completion", "bash")])
def test_what_is_printed_at_once(command: str, args: tuple[str, ...]) -> None:
    assert run_unread(command, *args) == (PIPE_STATUS, "")


def test_a_ticket(tmp_path: Path) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    Identity.load(cluster.directory / IDENTITY_FILE)  # made
    where = ("--cluster", str(cluster.directory), "--listen", "/ip4/192.0.2.7/tcp/9000")
    status, stderr = run_unread("coordinator", "--ticket", *where)
    assert "Traceback" not in stderr
    assert status == PIPE_STATUS, stderr


@pytest.mark.parametrize(
    "args", [("--plan-only",), ("--prompt", "A function definition", "--max-tokens", "200")]
)
def test_what_comes_after_a_while(workers: list[WorkerProcess], args: tuple[str, ...]) -> None:
    peer = ("--peer", workers[0].address)
    status, stderr = run_unread("coordinator", *HERE, *peer, *args)
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    assert status == PIPE_STATUS, stderr
