"""Clusters, tickets and allow lists through the commands, on loopback."""

from __future__ import annotations

import logging
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from neurogrid.cli.commands.coordinator import main
from neurogrid.cli.commands.worker import build_parser as worker_parser
from neurogrid.cli.options.common import listening, warn_of_loopback
from neurogrid.p2p.hosts.identity import Identity
from tests.e2e.commands import Ended, patiently, run_preloaded
from tests.e2e.coordinator_process import (
    LOOPBACK,
    PROMPT,
    start_coordinator,
    ticket_of,
)
from tests.e2e.preloaded import COORDINATOR, DEADLINE, ENVIRONMENT, WORKER, command_after, run
from tests.e2e.support import WorkerProcess, start_worker


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


def coordinator_command(*args: str) -> tuple[int, str, str]:
    """Run the command to its end: status, stdout, stderr."""
    ended = run([*COORDINATOR, *args])
    return ended.returncode, ended.stdout, ended.stderr


def test_tickets_and_revocations_while_a_coordinator_runs(tmp_path: Path) -> None:
    """Nothing is typed on a worker but the line that `--ticket` prints; who is revoked goes at once, and may return."""
    cluster = ("--cluster", str(tmp_path / "cluster"))
    status, line, said = coordinator_command(*cluster, "--ticket")
    assert (status, line) == (2, "")
    new = ("--new-cluster", str(tmp_path / "cluster"), "--min-peers", "2", "--wait", str(DEADLINE))
    with start_coordinator(*new) as coordinator:
        ticket_of(coordinator)
        status, line, said = coordinator_command(*cluster, "--ticket", "--expires", "7d")
        assert (status, line[:21]) == (0, "NEUROGRID_TICKET=ngt1"), said
        status, _, again = coordinator_command(*cluster, "--prompt", "x", *LOOPBACK)
        assert status == 2, again
        assert f"already: process {coordinator.process.pid} on " in again
        assert "listens on loopback only" in said
        (tmp_path / "line").write_text(line)
        join = (*LOOPBACK, "--join", f"@{tmp_path / 'line'}")
        with start_worker(tmp_path, *join) as worker:
            coordinator.wait_line(f"{worker.peer_id} has joined as worker, by a ticket")
            status, _, said = coordinator_command(*cluster, "--revoke", worker.peer_id)
            assert (status, "all tickets are void" in said) == (0, True), said
            refused = coordinator.wait_line(f"refused {worker.peer_id}: ")
            assert "was revoked by the cluster" in refused
            made = an_hour_ago("coordinator", *cluster, "--ticket", "--expires", "30m")
            ticket = made.stdout.split()[0].removeprefix("NEUROGRID_TICKET=")
            expired = an_hour_ago("worker", *LOOPBACK, ticket=ticket)
            assert expired.returncode == 1, expired.stderr
            assert "refused us: the ticket expired at" in expired.stderr.splitlines()[-1]
            coordinator.wait_line("the ticket expired at")
            # Who was revoked goes on asking, and is told why not; a ticket is of no help.
            wait_log(worker, "refused us: the certificate (serial ")
            assert coordinator_command(*cluster, "--reinstate", worker.peer_id)[0] == 0
            # The ticket of before is void.
            (tmp_path / "line").write_text(coordinator_command(*cluster, "--ticket")[1])
            with start_worker(tmp_path, *join):
                status, text = coordinator.wait_end()
                assert (status, bool(text.strip())) == (0, True), coordinator.lines


def an_hour_ago(command: str, *args: str, ticket: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command where the clock is an hour behind: whether a ticket has expired, the coordinator's decides."""
    behind = "import time; real = time.time; time.time = lambda: real() - 3600"
    return run(
        [*command_after(behind, command), *args],
        env={**ENVIRONMENT, **({"NEUROGRID_TICKET": ticket} if ticket else {})},
    )


def wait_log(worker: WorkerProcess, part: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while part not in worker.log:
        assert time.monotonic() < deadline, worker.log
        time.sleep(0.1)


def test_a_cluster_is_made_last_of_all(tmp_path: Path) -> None:
    """What is wrong with the rest is told first, and nothing is left that the next try would stumble over."""
    new = ("--new-cluster", str(tmp_path / "cluster"))
    for wrong in (
        ("--model", str(tmp_path / "nothing")),
        ("--prompt", "too long " * 20, "--max-seq-len", "8", "--min-peers", "1"),
        ("--stages", "3", "--min-peers", "1"),
    ):
        ended = run_preloaded("coordinator", *PROMPT, *LOOPBACK, *new, *wrong)
        assert ended.status in (1, 2), ended
        assert not (tmp_path / "cluster").exists(), ended


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ticket"], "--ticket needs --cluster DIR"),
        (["--void-tickets"], "--void-tickets needs --cluster DIR"),
        (["--void-tickets", "--ticket"], "give --ticket or --void-tickets, not both"),
        (["--keep-tickets"], "--keep-tickets says nothing without --revoke"),
        (["--ticket", "--uses", "0"], "0 is not between 1 and 4096"),
        ([*PROMPT, "--uses", "2"], "--uses is of tickets"),
        (["--revoke", "x", *PROMPT], "give --revoke or --prompt, not both"),
        (["--ticket", "--cluster", ".", "--revoke", "x"], "give --ticket or --revoke"),
        (["--ticket", "--cluster", "."], "make a cluster with neurogrid-coordinator --new-cluster"),
        (["--ticket", "--expires", "24"], "'24' is no time span: try 30m, 24h or 7d"),
        (["--ticket", "--expires", "0s"], "0s is not between 1s and 3650d"),
        ([*PROMPT, "--expires", "24h"], "--expires is of tickets"),
        (["--diagnose", "--new-cluster", "."], "a new cluster has no workers yet"),
    ],
)
def test_what_is_wrong_with_the_options_is_said(
    args: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(args)
    except SystemExit as exc:
        status = int(str(exc.code))
    assert status == 2
    said = capfd.readouterr()
    assert says in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "For others add --cluster DIR"),
        (["--port", "0"], "For others add --cluster DIR"),
        (["--relay-service"], "For others add --cluster DIR"),
        ([*LOOPBACK], "cannot reach this peer"),
        ([*LOOPBACK, "--insecure"], "cannot reach this peer"),
        ([*LOOPBACK, "--cluster", "DIR"], "cannot reach this peer"),
        (["--insecure"], ""),
        (["--cluster", "DIR"], ""),
        (["--join", "-"], ""),
        (["--allow", "X=coordinator"], ""),
        (["--listen", "/ip4/0.0.0.0/tcp/0", "--allow", "X=coordinator"], ""),
        ([*LOOPBACK, "--listen", "/ip4/0.0.0.0/tcp/0", "--cluster", "DIR"], ""),
    ],
)
def test_who_listens_on_loopback_alone_says_so(
    args: list[str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="neurogrid")
    options = worker_parser().parse_args(args)
    where = listening(options, port_flag="--port")
    warn_of_loopback(where, is_chosen=bool(options.listen))
    assert (says in caplog.text) if says else not caplog.records
    exposed = [address for address in where.addresses if "0.0.0.0" in address]
    assert bool(exposed) == (not says)


def test_who_is_no_member_is_not_used(tmp_path: Path) -> None:
    with start_worker(tmp_path, *LOOPBACK) as stranger:

        def look(wait: str) -> Ended:
            cluster = ("--new-cluster", str(tmp_path / wait), "--peer", stranger.address)
            return run_preloaded("coordinator", *PROMPT, *LOOPBACK, *cluster, "--wait", wait)

        ended = patiently(look, lambda ended: stranger.peer_id in ended.stderr)
        assert (ended.status, ended.stdout) == (1, "")
        assert "0 of 1 workers were there after " in ended.stderr
        assert stranger.peer_id in ended.stderr
        assert "serves" not in stranger.log


def test_an_allow_list_names_who_may(tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("coordinator.key", "worker.key", "other.key")]
    coordinator_id, worker_id, other_id = (Identity.load(key).peer_id for key in keys)
    allow = ("--allow", f"{coordinator_id}=coordinator")
    with start_worker(tmp_path, *LOOPBACK, *allow, "--identity", str(keys[1])) as worker:

        def coordinate(key: Path, wait: str) -> Ended:
            flags = ("--peer", worker.address, "--allow", f"{worker_id}=worker")
            identity = ("--identity", str(key), "--wait", wait)
            return run_preloaded("coordinator", *PROMPT, *LOOPBACK, *flags, *identity)

        ended = coordinate(keys[0], str(DEADLINE))
        assert ended.status == 0, ended
        ended = patiently(partial(coordinate, keys[2]), lambda _: other_id in worker.log)
        assert ended.status == 1, ended
        assert other_id in worker.log
        assert "not on the list" in worker.log


def test_local_workers_are_members(tmp_path: Path) -> None:
    cluster = ("--new-cluster", str(tmp_path / "cluster"), "--local-workers", "2")
    with start_coordinator(*cluster, "--wait", str(DEADLINE)) as coordinator:
        status, text = coordinator.wait_end()
        assert (status, bool(text.strip())) == (0, True), coordinator.lines
        assert any("in 2 stages" in line for line in coordinator.lines)
        assert not any("refused" in line for line in coordinator.lines), coordinator.lines


def test_local_workers_are_on_the_list(tmp_path: Path) -> None:
    allow = ("--allow", f"{Identity.generate().peer_id}=worker", "--local-workers", "1")
    with start_coordinator(*allow, "--wait", str(DEADLINE)) as coordinator:
        status, text = coordinator.wait_end()
        assert (status, bool(text.strip())) == (0, True), coordinator.lines


def worker_refuses(*args: str) -> str:
    ended = run([*WORKER, *LOOPBACK, *args])
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
