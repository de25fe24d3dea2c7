"""What the commands do with a cluster's directory: who is told the ticket, who runs with it, and who may not."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neurogrid.cli.commands import coordinator, main, worker
from neurogrid.cli.commands.cluster import manage_cluster
from neurogrid.cli.options.cache import cache_of
from neurogrid.cli.options.trust import Trust, is_checked, take_ticket, trust_of
from neurogrid.errors import ConfigurationError
from neurogrid.node.cache_directory import CacheSettings, open_directory
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    ClusterAdmission,
    DirectoryInUseError,
    Membership,
    Ticket,
    Whereabouts,
    read_ticket,
)
from neurogrid.p2p.trust.private_files import write_private
from tests.unit.forked import Forked

PEER = Identity.generate().peer_id
ADDRESS = f"/ip4/192.0.2.1/tcp/9000/p2p/{PEER}"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.create(tmp_path / "cluster")


def trust(cluster: Cluster, **options: object) -> Trust:
    return Trust(cluster=cluster, **options)  # type: ignore[arg-type]


def is_private(file: Path) -> bool:
    return file.stat().st_mode & 0o777 == 0o600


def test_a_new_clusters_ticket_is_shown_on_a_terminal(cluster: Cluster) -> None:
    line = trust(cluster, is_new=True).invite(PEER, [ADDRESS], True)
    given, *command = line.split()
    assert command == ["neurogrid", "join"]
    assert Ticket.parse(given.removeprefix("NEUROGRID_TICKET=")).peer_id == PEER
    assert not (cluster.directory / "ticket").exists()


def test_what_is_kept_somewhere_gets_no_ticket(cluster: Cluster) -> None:
    line = trust(cluster, is_new=True).invite(PEER, [ADDRESS], False)
    file = cluster.directory / "ticket"
    assert str(file) in line
    assert "ngt1" not in line
    assert is_private(file)
    assert read_ticket(f"@{file}").peer_id == PEER


def test_a_ticket_goes_to_the_file_that_was_named(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "for workers"
    file.write_text("older")
    file.chmod(0o644)
    told = trust(cluster, ticket_file=file, ticket_uses=2)
    for is_terminal in (True, False):
        assert "ngt1" not in told.invite(PEER, [ADDRESS], is_terminal)
        assert is_private(file)
        assert read_ticket(f"@{file}").token.max_uses == 2


def test_later_starts_make_no_ticket(cluster: Cluster) -> None:
    """They say how to ask for one, and where it leads to is known then."""
    for is_terminal in (True, False):
        line = trust(cluster).invite(PEER, [ADDRESS], is_terminal)
        assert f"neurogrid ticket {cluster.directory}" in line
        assert "ngt1" not in line
    assert not (cluster.directory / "ticket").exists()
    where = cluster.whereabouts()
    assert where is not None
    assert where.addresses == (ADDRESS,)


def manage(*args: str) -> None:
    manage_cluster(coordinator.build_parser().parse_args(args))


def test_a_ticket_is_printed_or_written(
    cluster: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "neurogrid")
    cluster.note_whereabouts(Whereabouts.of(PEER, [ADDRESS]))
    where = ("--cluster", str(cluster.directory), "--ticket", "--uses", "3")
    manage(*where)
    line = capsys.readouterr().out
    assert line.startswith("NEUROGRID_TICKET=ngt1")
    assert "for 3 workers" in caplog.text
    manage(*where, "--ticket-file", str(tmp_path / "ticket"))
    assert capsys.readouterr().out == ""
    assert is_private(tmp_path / "ticket")
    assert read_ticket(f"@{tmp_path / 'ticket'}").token.max_uses == 3
    assert "ngt1" not in caplog.text
    (tmp_path / "line").write_text(line)
    assert read_ticket(f"@{tmp_path / 'line'}").token.max_uses == 3


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_file_that_others_read_is_warned_of(cluster: Cluster, tmp_path: Path, mode: int) -> None:
    cluster.note_whereabouts(Whereabouts.of(PEER, [ADDRESS]))
    (tmp_path / "out").touch(mode=mode)
    (tmp_path / "out").chmod(mode)
    with (tmp_path / "out").open("w") as out:
        command = ["ticket", str(cluster.directory)]
        with Forked(main.main, command, stdout=out, stderr=subprocess.PIPE) as process:
            _, said = process.communicate()
    assert process.returncode == 0, said
    assert ("others can read the file" in said) == (mode == 0o644)
    assert read_ticket(f"@{tmp_path / 'out'}").peer_id == PEER


def test_the_environment_stands_for_join(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = cluster.ticket(PEER, [ADDRESS]).text()
    for args in ((), ("join",)):
        monkeypatch.setenv("NEUROGRID_TICKET", text)
        options = main.parse(args)[2] if args else worker.build_parser().parse_args([])
        take_ticket(options)
        assert "NEUROGRID_TICKET" not in os.environ
        assert is_checked(options)
        assert trust_of(options, is_worker=True).bootstrap == (ADDRESS,)
    monkeypatch.setenv("NEUROGRID_TICKET", "nothing")
    options = worker.build_parser().parse_args(["--join", text])
    take_ticket(options)
    assert options.join == text
    monkeypatch.setenv("NEUROGRID_TICKET", text)
    options = worker.build_parser().parse_args(["--insecure"])
    take_ticket(options)
    with pytest.raises(ConfigurationError, match="NEUROGRID_TICKET"):
        is_checked(options)


@pytest.mark.parametrize(
    "line", ["{}", "{}\n", "NEUROGRID_TICKET={} neurogrid join\n", "neurogrid join {}"]
)
def test_a_ticket_comes_by_standard_input(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    text = cluster.ticket(PEER, [ADDRESS]).text()
    monkeypatch.setattr(sys, "stdin", io.StringIO(line.format(text)))
    assert read_ticket("-").text() == text


def test_who_is_a_member_may_keep_a_ticket_that_has_expired(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As the settings of a service do, which is started again and again."""
    ticket = cluster.ticket(PEER, [ADDRESS], lifetime=60, now=1e9).text()
    arguments = ["--join", ticket, "--cluster", str(tmp_path / "member")]
    options = worker.build_parser().parse_args(arguments)
    with pytest.raises(ConfigurationError, match="ticket"):
        trust_of(options, is_worker=True)
    peer_id = Identity.load(tmp_path / "member" / "identity.key").peer_id
    certificate = cluster.issue(peer_id, WORKER)
    Membership(cluster.public_key, certificate, directory=tmp_path / "member").save()
    found = trust_of(options, is_worker=True)
    assert isinstance(found.admission, ClusterAdmission)
    assert found.admission.membership.certificate == certificate


# Who runs with it


def hold(directory: Path) -> None:
    with Cluster.load(directory).held():
        print("held", flush=True)
        sys.stdin.read()


@contextmanager
def holder(cluster: Cluster) -> Iterator[Forked]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Forked(hold, cluster.directory, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_coordinator_at_a_time_runs_with_a_cluster(cluster: Cluster) -> None:
    """Until its process has ended, however that came; tickets and revocations go on meanwhile."""
    with holder(cluster) as process:
        with pytest.raises(DirectoryInUseError, match=f"process {process.pid} on .*, since 20"):
            cluster.held().__enter__()
        data = cluster.ticket(PEER, [ADDRESS], max_uses=1).token.data
        assert cluster.redeem(data, PEER, now=0, lifetime=60).peer_id == PEER
        assert cluster.revoke([PEER]).version == 1
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        with cluster.held(), pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} on"):
            cluster.held().__enter__()
    with cluster.held():
        pass


@pytest.mark.parametrize(
    "args", [("--prompt", "x"), ("--chat",), (), ("--plan-only",)], ids=lambda args: "".join(args)
)
def test_a_second_coordinator_says_who_has_the_cluster(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    with cluster.held():
        where = ("--listen", "/ip4/127.0.0.1/tcp/0", "--cluster", str(cluster.directory))
        assert coordinator.main([*where, *args]) == 2
    assert f"runs with {cluster.directory} already: process {os.getpid()}" in capfd.readouterr().err


def test_who_looks_on_beside_a_coordinator_has_a_peer_id_of_its_own(cluster: Cluster) -> None:
    membership = cluster.enrol(PEER, COORDINATOR)
    running = Trust(ClusterAdmission(membership, admits={WORKER}, issuer=cluster), cluster=cluster)
    other = Identity.generate().peer_id
    beside = running.beside(other)
    beside.bind(other)
    shown = beside.credentials(PEER)
    assert running.admission is not None
    assert not shown.is_issuer
    admits_all = ClusterAdmission(membership, admits={COORDINATOR})
    assert admits_all.judge(other, shown).role == COORDINATOR


# Who may not


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[None]:
    """As a user for whom `tmp_path` is somebody else's."""
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        yield
        tmp_path.chmod(0o700)
        return
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory.stat().st_uid == 0 and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


COORDINATOR_PATHS = (
    ("--new-cluster",),
    ("--cluster",),
    ("--ticket", "--cluster"),
    ("--void-tickets", "--cluster"),
)


@pytest.mark.parametrize("where", ["may not be written", "is a file", "too long"])
@pytest.mark.parametrize("flags", COORDINATOR_PATHS, ids=" ".join)
def test_a_coordinators_path_that_cannot_be_used_is_a_users_mistake(
    tmp_path: Path,
    unprivileged: None,
    capfd: pytest.CaptureFixture[str],
    where: str,
    flags: tuple[str, ...],
) -> None:
    more = ["--plan-only"] if len(flags) == 1 else []
    check_path(tmp_path, capfd, where, flags, coordinator.main, more)


@pytest.mark.parametrize("where", ["may not be written", "is a file", "too long"])
def test_a_workers_path_that_cannot_be_used_is_a_users_mistake(
    tmp_path: Path, unprivileged: None, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    check_path(tmp_path, capfd, where, ("--cluster",), worker.main, [])
    path = path_that(where, tmp_path)
    with pytest.raises(ConfigurationError, match=re.escape(str(path))):
        Identity.load(path)
    with pytest.raises(ConfigurationError, match=re.escape(str(path))):
        open_directory(CacheSettings(path, is_required=True), "blobs")
    with pytest.raises(ConfigurationError, match=re.escape(str(path.parent))):
        write_private(path, b"a ticket")


def test_who_has_no_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_of(worker.build_parser().parse_args([])) is None
    assert cache_of(worker.build_parser().parse_args(["--cache-dir", "x"])) is not None


def path_that(where: str, tmp_path: Path) -> Path:
    return {
        "may not be written": tmp_path / "mine" / "directory",
        "is a file": Path(sys.executable) / "directory",
        "too long": tmp_path / ("x" * 300),
    }[where]


def check_path(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    where: str,
    flags: tuple[str, ...],
    main: Callable[[list[str]], int],
    more: list[str],
) -> None:
    path = path_that(where, tmp_path)
    status = main([*more, "--listen", "/ip4/127.0.0.1/tcp/0", *flags, str(path)])
    said = capfd.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said
    assert str(path) in said
