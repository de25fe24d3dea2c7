"""`neurogrid train testnet`: its processes, its report, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from neurogrid.training.testnet import Lines
from neurogrid.training.testnet.network import open_network
from tests.e2e.namespaces.netns import why_no_namespaces
from tests.e2e.preloaded import DEADLINE, TRAIN, Popen, run
from tests.e2e.training.run_processes import RUN_FILE, make_inputs, used_samples

SHORT = "[stop]\nepochs = 1\n[outer]\nevery = 8\nfragments = 2\ngrace = 3.0\n[members]\nmin = 2\n"


def processes_in(directory: Path) -> list[int]:
    """The processes whose working directory this is."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (each / "cwd").readlink() == directory and (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except OSError:
            continue
    return found


def wait_none(directory: Path) -> None:
    until = time.monotonic() + DEADLINE
    while left := processes_in(directory):
        assert time.monotonic() < until, f"these are left: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("lines", [(), ("--delay", "20", "--rate", "50")])
def test_a_run_whose_worker_is_killed(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """And a new one comes in its place; where lines are as they are, the run is made once more without that."""
    if lines and (reason := why_no_namespaces()):
        pytest.skip(reason)
    make_inputs(tmp_path, num_words=12_000)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    options = ("--dir", "run", "--workers", "2", "--kill", "1", "--kill-every", "0.5")
    options = (*options, "--seed", "5", "--join", "1", *(() if lines else ("--undisturbed",)))
    ended = run([*TRAIN, "testnet", "run.toml", *options, *lines], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "run" / "testnet.json").read_text())
    assert report["is_sound"]
    assert report["audit"]["epochs"] == 1
    (kill,) = report["kills"]
    assert kill["name"] in ("worker-1", "worker-2")
    # It had a minimum of two, and so went on when it was there again.
    assert kill["rejoined_seconds"] > 0
    assert kill["next_round_seconds"] > 0
    assert kill["is_new"]
    assert report["num_joins"] == 1
    assert (tmp_path / "run" / "testnet" / f"{kill['name']}.1").is_dir()
    assert report["audit"]["joined"] >= 3
    assert set(used_samples(tmp_path / "run").values()) == {1}
    assert "each sample of 1 epoch exactly once" in ended.stdout
    assert report["lines"] == ({"delay": 0.02, "rate": 50e6} if lines else None)
    assert not processes_in(tmp_path)
    if not lines:
        other = json.loads((tmp_path / "run" / "undisturbed" / "testnet.json").read_text())
        assert other["is_sound"]
        assert not other["kills"]
        apart = abs(report["held_out_loss"] - other["held_out_loss"])
        assert ended.stdout.endswith(f": {apart:.4f} apart\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_cut_off(tmp_path: Path, signum: signal.Signals) -> None:
    make_inputs(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    with Popen(
        [*TRAIN, "testnet", "run.toml", "--dir", "run", "--workers", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    ) as process:
        try:
            until = time.monotonic() + DEADLINE
            while not (tmp_path / "run" / "testnet" / "worker-2.log").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            assert len(processes_in(tmp_path)) >= 4
        finally:
            os.kill(process.pid, signum)
            process.wait(DEADLINE)
    wait_none(tmp_path)
    assert process.returncode == (130 if signum == signal.SIGINT else -signum)


SERVER = """
import socket
server = socket.create_server((HOST, 5000))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(65536):
    pass
connection.sendall(b"x")
"""
CLIENT = """
import socket, time
began = time.monotonic()
connection = socket.create_connection((HOST, 5000))
connected = time.monotonic()
connection.sendall(bytes(1_000_000))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"x"
print(connected - began, time.monotonic() - connected)
"""


async def test_lines_have_their_delay_and_their_rate(tmp_path: Path) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    lines = Lines(delay=0.05, rate=20e6)
    async with open_network(["leader", "a", "b"], lines, tmp_path / "log") as network:
        names = [network.command(name)[-1] for name in ("leader", "a", "b")]
        assert all(Path("/run/netns", name).exists() for name in names)
        server, client = (
            [*network.command(name), sys.executable, "-c", f"HOST = {network.address('b')!r}{code}"]
            for name, code in (("b", SERVER), ("a", CLIENT))
        )
        with subprocess.Popen(server, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"listening\n"
            result = await trio.run_process(client, capture_stdout=True)
            assert serving.wait(DEADLINE) == 0
        connecting, sending = map(float, result.stdout.split())
        assert network.status is None
    # A packet there and one back; then all bits, and an answer.
    assert connecting >= 0.1
    assert sending >= 8e6 / 20e6 + 0.1
    assert not any(Path("/run/netns", name).exists() for name in names)


def test_what_it_refuses(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    few = run([*TRAIN, "testnet", "run.toml", "--workers", "1"], cwd=tmp_path)
    assert few.returncode == 2
    assert "the run waits for 2 members" in few.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").touch()
    again = run([*TRAIN, "testnet", "run.toml", "--dir", "run"], cwd=tmp_path)
    assert again.returncode == 2
    assert "has a run already" in again.stderr
