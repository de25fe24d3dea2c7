"""Clusters, tickets and allow lists through the commands, on loopback."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neurogrid.p2p.identity import Identity
from tests.e2e.support import DEADLINE, ENVIRONMENT, start_worker

COORDINATOR = (sys.executable, "-m", "neurogrid.cli.coordinator")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
PROMPT = ("--prompt", "A function definition", "--max-tokens", "4")


class CoordinatorProcess:
    """A `neurogrid-coordinator` whose stderr can be waited for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._coming: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self._coming.put(line)
        self._coming.put("")

    def wait_line(self, part: str) -> str:
        """The first line from here on with `part` in it."""
        while line := self._coming.get(timeout=DEADLINE):
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"it ended without {part!r}: {''.join(self.lines)}")

    def wait_end(self) -> tuple[int, str]:
        """Its status, and what it wrote to stdout."""
        while line := self._coming.get(timeout=DEADLINE):
            self.lines.append(line)
        assert self.process.stdout is not None
        return self.process.wait(DEADLINE), self.process.stdout.read()


@contextmanager
def start_coordinator(*args: str) -> Iterator[CoordinatorProcess]:
    process = subprocess.Popen(
        [*COORDINATOR, *PROMPT, *LOOPBACK, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    coordinator = CoordinatorProcess(process)
    try:
        yield coordinator
    finally:
        coordinator.end()


def ticket_of(coordinator: CoordinatorProcess) -> str:
    """As somebody would copy it."""
    return coordinator.wait_line("neurogrid-worker --join ").split("--join ")[1].strip()


def test_a_worker_joins_by_ticket_and_is_a_member_from_then_on(tmp_path: Path) -> None:
    cluster, member = tmp_path / "cluster", tmp_path / "member"
    with start_coordinator("--new-cluster", str(cluster), "--min-peers", "1") as coordinator:
        (tmp_path / "ticket").write_text(ticket_of(coordinator))
        join = ("--join", f"@{tmp_path / 'ticket'}", "--cluster", str(member))
        with start_worker(tmp_path, *LOOPBACK, *join) as worker:
            status, text = coordinator.wait_end()
            assert (status, bool(text.strip())) == (0, True), coordinator.lines
            assert any("has joined as worker, by a ticket" in line for line in coordinator.lines)
            first = worker.peer_id
    assert (cluster / "cluster.key").stat().st_mode & 0o777 == 0o600

    # The same worker, without a ticket; and one that knows the address alone.
    with (
        start_worker(tmp_path, *LOOPBACK, "--cluster", str(member)) as worker,
        start_worker(tmp_path, *LOOPBACK) as stranger,
        start_coordinator(
            *("--cluster", str(cluster), "--peer", worker.address),
            *("--bootstrap", stranger.address),
        ) as coordinator,
    ):
        assert worker.peer_id == first
        status, again = coordinator.wait_end()
        assert (status, again) == (0, text), coordinator.lines
        assert "serves embedded" not in stranger.log


def test_who_is_no_member_is_not_used(tmp_path: Path) -> None:
    with start_worker(tmp_path, *LOOPBACK) as stranger:
        cluster = ("--new-cluster", str(tmp_path / "cluster"))
        with start_coordinator(*cluster, "--peer", stranger.address, "--wait", "8") as coordinator:
            status, text = coordinator.wait_end()
        said = "".join(coordinator.lines)
        assert (status, text) == (1, "")
        assert "0 of 1 workers were there after 8 s" in said
        assert stranger.peer_id in said
        assert "serves" not in stranger.log


def test_an_allow_list_names_who_may(tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("coordinator.key", "worker.key", "other.key")]
    coordinator_id, worker_id, other_id = (Identity.load(key).peer_id for key in keys)
    allow = ("--allow", f"{coordinator_id}=coordinator")
    worker_args = (*LOOPBACK, *allow, "--identity", str(keys[1]))
    with start_worker(tmp_path, *worker_args) as worker:
        peer = ("--peer", worker.address, "--wait", "8")
        with start_coordinator(
            *peer, "--identity", str(keys[0]), "--allow", f"{worker_id}=worker"
        ) as coordinator:
            assert coordinator.wait_end()[0] == 0, coordinator.lines
        with start_coordinator(
            *peer, "--identity", str(keys[2]), "--allow", f"{worker_id}=worker"
        ) as coordinator:
            assert coordinator.wait_end()[0] == 1, coordinator.lines
        assert other_id in worker.log
        assert "not on the list" in worker.log


def worker_refuses(*args: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "neurogrid.cli.worker", *LOOPBACK, *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


def test_what_is_no_good_ticket_is_refused_with_the_reason(tmp_path: Path) -> None:
    from neurogrid.p2p.trust import Cluster

    cluster = Cluster.create(tmp_path / "cluster")
    peer_id = Identity.generate().peer_id
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"
    good = cluster.ticket(peer_id, [address]).text()
    assert "cut" in worker_refuses("--join", good[:-20])
    altered = good[:100] + ("a" if good[100] != "a" else "b") + good[101:]
    assert "altered" in worker_refuses("--join", altered)
    assert "expired" in worker_refuses(
        "--join", cluster.ticket(peer_id, [address], lifetime=1, now=1e9).text()
    )
    assert "give one of" in worker_refuses("--join", good, "--insecure")
    assert "join a cluster first" in worker_refuses("--cluster", str(tmp_path / "nothing"))
