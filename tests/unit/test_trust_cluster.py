"""A cluster's directory, what it signs, and what members keep."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    Membership,
    Refusal,
    RefusedError,
    RevocationList,
)
from neurogrid.p2p.trust.private_files import DirectoryLockedError, locked, write_private
from tests.unit.forked import Forked
from tests.unit.full_disk import full_disk
from tests.unit.test_trust_formats import OTHER, PEER

NOW = 1_800_000_000.0
THIRD = "12D3KooWKB63wofPS1XwMmtt27ainsRwoJPpmqzDKjN8wgqQGgfh"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.create(tmp_path / "cluster")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_cluster_is_its_owners_alone(cluster: Cluster) -> None:
    assert mode(cluster.directory) == 0o700
    assert mode(cluster.directory / "cluster.key") == 0o600
    again = Cluster.load(cluster.directory)
    assert again.cluster_id == cluster.cluster_id
    assert again.public_key == cluster.public_key


def test_a_cluster_is_not_overwritten(cluster: Cluster) -> None:
    before = (cluster.directory / "cluster.key").read_bytes()
    with pytest.raises(ConfigurationError, match="is there already"):
        Cluster.create(cluster.directory)
    assert (cluster.directory / "cluster.key").read_bytes() == before


def test_a_key_that_others_can_read_is_refused(cluster: Cluster) -> None:
    (cluster.directory / "cluster.key").chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Cluster.load(cluster.directory)


def test_what_is_no_cluster_says_so(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="--new-cluster"):
        Cluster.load(tmp_path / "nothing")
    key = cluster.directory / "cluster.key"
    key.write_bytes(b"no key")
    with pytest.raises(ConfigurationError, match="no private key"):
        Cluster.load(cluster.directory)
    other = X25519PrivateKey.generate()
    key.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigurationError, match="no Ed25519 key"):
        Cluster.load(cluster.directory)
    key.write_bytes(bytes(10_000))
    with pytest.raises(ConfigurationError, match="longer than"):
        Cluster.load(cluster.directory)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot make the directory"):
        Cluster.create(tmp_path / "file" / "cluster")


def test_certificates_name_peer_role_and_time(cluster: Cluster) -> None:
    made = cluster.issue(PEER, WORKER, lifetime=60, now=NOW)
    assert (made.peer_id, made.role, made.cluster_id) == (PEER, WORKER, cluster.cluster_id)
    assert (made.not_before, made.not_after) == (NOW, NOW + 60)
    assert cluster.issue(PEER, WORKER).serial != made.serial
    for peer_id, role in ((PEER, "any"), ("nobody", WORKER)):
        with pytest.raises(ConfigurationError, match="no certificate for"):
            cluster.issue(peer_id, role)


def test_lists_of_revocations_grow_in_version(cluster: Cluster) -> None:
    assert cluster.revocations() == RevocationList()
    assert cluster.revoke([PEER]).version == 1
    both = cluster.revoke(serials=[5])
    assert (both.version, both.peer_ids, both.serials) == (2, {PEER}, {5})
    with pytest.raises(ConfigurationError, match="reinstate"):
        cluster.issue(PEER, WORKER)
    assert Cluster.load(cluster.directory).revocations() == both
    assert cluster.reinstate([PEER]).version == 3
    cluster.issue(PEER, WORKER)
    with pytest.raises(ConfigurationError, match="no peer id"):
        cluster.revoke(["nobody"])
    assert mode(cluster.directory / "revocations") == 0o600


def test_a_list_of_another_cluster_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster.create(tmp_path / "other")
    other.revoke([PEER])
    (cluster.directory / "revocations").write_bytes((other.directory / "revocations").read_bytes())
    with pytest.raises(ConfigurationError, match="not signed by the cluster's key"):
        cluster.revocations()


def redeem(cluster: Cluster, data: bytes, peer_id: str = PEER, now: float = NOW) -> Refusal | None:
    try:
        made = cluster.redeem(data, peer_id, now=now, lifetime=60)
    except RefusedError as exc:
        return exc.reason
    assert (made.peer_id, made.role) == (peer_id, WORKER)
    return None


def test_tokens_give_certificates_until_they_expire(cluster: Cluster) -> None:
    data = cluster.ticket(PEER, [], lifetime=3600, now=NOW).token.data
    assert [redeem(cluster, data) for _ in range(5)] == [None] * 5
    assert redeem(cluster, data, now=NOW + 3599) is None
    assert redeem(cluster, data, now=NOW + 3600) is Refusal.TOKEN_EXPIRED
    assert redeem(cluster, data[:-1]) is Refusal.TOKEN_INVALID
    assert not (cluster.directory / "token-uses").exists()


def test_uses_of_a_token_are_counted_across_processes(cluster: Cluster) -> None:
    data = cluster.ticket(PEER, [], max_uses=2, now=NOW).token.data
    assert redeem(cluster, data) is None
    again = Cluster.load(cluster.directory)
    assert redeem(again, data, OTHER) is None
    assert redeem(again, data, THIRD) is Refusal.TOKEN_USED_UP
    assert redeem(cluster, data, THIRD) is Refusal.TOKEN_USED_UP
    # A clock that was ahead for a while brings nothing back; a month later they are forgotten.
    soon = NOW + 2 * 86_400
    another = cluster.ticket(PEER, [], max_uses=1, now=soon).token.data
    assert redeem(cluster, another, now=soon) is None
    assert redeem(cluster, data, THIRD) is Refusal.TOKEN_USED_UP
    later = NOW + 33 * 86_400
    another = cluster.ticket(PEER, [], max_uses=1, now=later).token.data
    size = (cluster.directory / "token-uses").stat().st_size
    assert redeem(cluster, another, now=later) is None
    assert (cluster.directory / "token-uses").stat().st_size < size


def test_a_use_belongs_to_one_peer(cluster: Cluster) -> None:
    """It gets the same certificate again, also of another process, and not one that is valid longer."""
    data = cluster.ticket(PEER, [], max_uses=1, lifetime=3600, now=NOW).token.data
    given = cluster.redeem(data, PEER, now=NOW, lifetime=60)
    for issuer in (cluster, Cluster.load(cluster.directory)):
        assert issuer.redeem(data, PEER, now=NOW + 59, lifetime=60) == given
        assert redeem(issuer, data, OTHER) is Refusal.TOKEN_USED_UP
    another = cluster.ticket(PEER, [], max_uses=1, now=NOW).token.data
    assert cluster.redeem(another, PEER, now=NOW, lifetime=60) != given
    assert redeem(cluster, data, now=NOW + 60) is Refusal.TOKEN_USED_UP
    assert redeem(cluster, data, now=NOW + 3600) is Refusal.TOKEN_EXPIRED


def test_a_peer_whose_certificate_has_expired_needs_another_use(cluster: Cluster) -> None:
    data = cluster.ticket(PEER, [], max_uses=2, now=NOW).token.data
    first = cluster.redeem(data, PEER, now=NOW, lifetime=60)
    second = cluster.redeem(data, PEER, now=NOW + 60, lifetime=60)
    assert second != first
    assert cluster.redeem(data, PEER, now=NOW + 90, lifetime=60) == second
    assert redeem(cluster, data, OTHER) is Refusal.TOKEN_USED_UP


def test_a_use_does_not_bring_back_what_was_revoked(cluster: Cluster) -> None:
    data = cluster.ticket(PEER, [], max_uses=2, now=NOW).token.data
    given = cluster.redeem(data, PEER, now=NOW, lifetime=60)
    cluster.revoke(serials=[given.serial], keep_tickets=True)
    assert redeem(cluster, data) is Refusal.REVOKED
    cluster.reinstate(serials=[given.serial])
    cluster.revoke([PEER], keep_tickets=True)
    assert redeem(cluster, data) is Refusal.REVOKED


def test_the_uses_of_all_tokens_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.p2p.trust.token_uses.MAX_USES_COUNTED", 2)
    for peer_id in (PEER, OTHER):
        data = cluster.ticket(PEER, [], max_uses=2, now=NOW).token.data
        assert redeem(cluster, data, peer_id) is None
    assert redeem(cluster, data, THIRD) is Refusal.TOKEN_USED_UP
    assert redeem(cluster, data, OTHER) is None


def test_a_revoked_peer_gets_nothing_for_a_token(cluster: Cluster) -> None:
    data = cluster.ticket(PEER, [], max_uses=1, now=NOW).token.data
    cluster.revoke([PEER], keep_tickets=True)
    assert redeem(cluster, data) is Refusal.REVOKED
    assert redeem(cluster, data, OTHER) is None  # the use was not spent


@pytest.mark.parametrize("max_uses", [0, 3])
def test_a_revocation_voids_the_tickets_of_before(cluster: Cluster, max_uses: int) -> None:
    """Whoever was revoked may have kept one, and has other keys."""
    before = cluster.ticket(PEER, [], max_uses=max_uses, now=NOW).token.data
    assert redeem(cluster, before) is None
    cluster.revoke([PEER])
    for issuer in (cluster, Cluster.load(cluster.directory)):
        assert redeem(issuer, before) is Refusal.TOKEN_VOID
        assert redeem(issuer, before, OTHER) is Refusal.TOKEN_VOID
    after = cluster.ticket(PEER, [], max_uses=max_uses, now=NOW).token.data
    assert redeem(cluster, after) is Refusal.REVOKED
    assert redeem(cluster, after, OTHER) is None
    # What is void stays so, and what was made later is not touched by what follows.
    cluster.reinstate([PEER])
    assert redeem(cluster, after) is None
    cluster.revoke([THIRD], keep_tickets=True)
    assert redeem(cluster, after, OTHER) is None
    assert redeem(cluster, before, OTHER) is Refusal.TOKEN_VOID
    cluster.revoke()
    assert redeem(cluster, after, OTHER) is Refusal.TOKEN_VOID


def test_an_issuer_goes_on_from_the_list_of_another(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(cluster.directory, tmp_path / "copy")
    copy = Cluster.load(tmp_path / "copy")
    made = copy.ticket(PEER, [], now=NOW).token.data
    theirs = cluster.revoke([PEER])
    copy.learn(theirs)
    assert redeem(copy, made, OTHER) is Refusal.TOKEN_VOID
    assert copy.revoke([OTHER]).peer_ids == {PEER, OTHER}
    copy.learn(theirs)
    assert copy.revocations().version == 2


def test_a_copy_is_the_cluster_and_nobody_of_it(cluster: Cluster, tmp_path: Path) -> None:
    identity = Identity.load(cluster.directory / "identity.key")
    cluster.enrol(identity.peer_id, COORDINATOR, now=NOW)
    cluster.revoke([THIRD])
    once = cluster.ticket(PEER, [], max_uses=1, now=NOW).token.data
    assert redeem(cluster, once) is None
    with cluster.held():  # which is no obstacle
        copy = cluster.copy_to(tmp_path / "copies" / "copy")
    assert mode(copy.directory) == 0o700
    files = {path.name: mode(path) for path in copy.directory.iterdir()}
    assert files == dict.fromkeys(("cluster.key", "revocations", "token-uses", "lock"), 0o600)
    for there in (copy, Cluster.load(copy.directory)):
        assert there.cluster_id == cluster.cluster_id
        assert there.revocations().peer_ids == {THIRD}
        assert redeem(there, once, OTHER) is Refusal.TOKEN_USED_UP
        assert there.whereabouts() is None
    # Its own coordinator is a member as the first one's is.
    membership = copy.enrol(Identity.load(copy.directory / "identity.key").peer_id, COORDINATOR)
    assert membership.certificate is not None
    assert membership.certificate.peer_id != identity.peer_id
    with pytest.raises(ConfigurationError, match="is there already"):
        cluster.copy_to(copy.directory)
    assert Cluster.create(tmp_path / "new").copy_to(tmp_path / "bare").revocations().version == 0


@pytest.mark.parametrize("max_uses", [1, 5])
def test_however_many_join_at_once_no_more_than_are_meant_to_do(
    cluster: Cluster, max_uses: int
) -> None:
    """From several issuers with one directory, each peer trying it several times."""
    data = cluster.ticket(PEER, [], max_uses=max_uses, now=NOW).token.data
    peer_ids = [Identity.generate().peer_id for _ in range(16)]
    issuers = [Cluster.load(cluster.directory) for _ in range(4)]
    barrier = threading.Barrier(32)

    def join(number: int) -> tuple[str, Refusal | bytes]:
        peer_id = peer_ids[number % 16]
        barrier.wait()
        try:
            made = issuers[number % 4].redeem(data, peer_id, now=NOW, lifetime=60)
        except RefusedError as exc:
            return peer_id, exc.reason
        return peer_id, made.data

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(join, range(32)))
    admitted = {peer_id: told for peer_id, told in results if isinstance(told, bytes)}
    assert len(admitted) == max_uses
    for peer_id, told in results:  # both times the same
        assert told == admitted.get(peer_id, Refusal.TOKEN_USED_UP)


def test_two_that_write_a_file_at_once_both_write_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two commands of one user that put a ticket into one file."""
    path, sync = tmp_path / "ticket", os.fsync

    def after_another(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_private(path, b"another's")
        assert path.read_bytes() == b"another's"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", after_another)
    write_private(path, b"one's")
    assert path.read_bytes() == b"one's"
    assert mode(path) == 0o600
    with full_disk(), pytest.raises(ConfigurationError, match=r"cannot write .*ticket"):
        write_private(path, b"a third one's")
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    left, fresh, other = (
        tmp_path / f"{name}.new" for name in ("cluster.key-1", "cluster.key-2", "ticket-1")
    )
    for file in (left, fresh, other):
        file.write_bytes(b"half of a key")
    for file in (left, other):
        os.utime(file, (0, 0))
    write_private(path, b"a key")
    assert set(tmp_path.iterdir()) == {path, fresh, other}


def stop_inside(directory: Path) -> None:
    with locked(directory):
        print("locked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_command_that_was_stopped_is_waited_for_with_a_deadline(cluster: Cluster) -> None:
    """It keeps the lock."""
    data = cluster.ticket(PEER, [], max_uses=1, now=NOW).token.data
    with Forked(stop_inside, cluster.directory, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            told = rf"process {process.pid} on .*kill -CONT"
            for patience in (0.0, 0.2):
                with pytest.raises(DirectoryLockedError, match=told):
                    cluster.redeem(data, PEER, now=NOW, lifetime=60, patience=patience)
        finally:
            process.send_signal(signal.SIGCONT)
    assert process.returncode == 0
    assert cluster.redeem(data, PEER, now=NOW, lifetime=60).peer_id == PEER


def test_on_a_full_disk_nothing_is_revoked_and_that_is_said(cluster: Cluster) -> None:
    before = cluster.revoke([PEER])
    with full_disk(), pytest.raises(ConfigurationError, match=r"cannot write .*revocations"):
        cluster.revoke([OTHER])
    assert cluster.revocations() == before
    assert cluster.revoke([OTHER]).peer_ids == {PEER, OTHER}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for somebody else")
def test_what_root_changes_stays_readable_to_the_owner(cluster: Cluster) -> None:
    """The directory of a service: it runs as another user, and has to learn of a revocation."""
    os.chown(cluster.directory, 65534, 65534)
    cluster.revoke([PEER])
    status = (cluster.directory / "revocations").stat()
    assert (status.st_uid, status.st_gid) == (65534, 65534)


@pytest.mark.parametrize(
    "options", [{"role": "any"}, {"max_uses": -1}, {"max_uses": 5000}, {"lifetime": 0}]
)
def test_tickets_out_of_range_are_not_made(cluster: Cluster, options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="no ticket for"):
        cluster.ticket(PEER, [], **options)  # type: ignore[arg-type]


def test_a_damaged_count_stops_the_ticket(cluster: Cluster) -> None:
    token = cluster.ticket(PEER, [], max_uses=2, now=NOW).token
    data = token.data
    for content in (
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\x91\xc0",
        msgpack.packb([[token.serial, token.not_after, 1]]),
        msgpack.packb([[token.serial, token.not_after, [[PEER, 1]]]]),
        msgpack.packb([[token.serial, token.not_after, [[PEER, b"no certificate"]]]]),
    ):
        (cluster.directory / "token-uses").write_bytes(content)
        with pytest.raises(ConfigurationError, match="does not count uses"):
            cluster.redeem(data, PEER, now=NOW, lifetime=60)


def test_a_membership_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "member"
    membership = Membership(cluster.public_key, directory=directory)
    membership.take_certificate(cluster.issue(PEER, COORDINATOR))
    newer = cluster.revoke([OTHER])
    assert membership.take_revocations(newer)
    assert not membership.take_revocations(newer)
    assert mode(directory / "membership") == 0o600
    again = Membership.load(directory)
    assert again.certificate == membership.certificate
    assert again.revocations == newer
    assert again.cluster_id == cluster.cluster_id


def test_a_damaged_membership_says_so(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neurogrid join TICKET"):
        Membership.load(tmp_path)
    Membership(cluster.public_key, cluster.issue(PEER, WORKER), directory=tmp_path).save()
    file = tmp_path / "membership"
    data = file.read_bytes()
    for at in (5, len(data) // 2, len(data) - 5):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ConfigurationError):
            Membership.load(tmp_path)


def test_a_host_with_the_key_enrols_itself(cluster: Cluster) -> None:
    first = cluster.enrol(PEER, COORDINATOR, now=NOW).certificate
    assert first is not None
    assert (first.peer_id, first.role) == (PEER, COORDINATOR)
    assert cluster.enrol(PEER, COORDINATOR, now=NOW + 86_400).certificate == first
    assert Membership.load(cluster.directory).certificate == first
    later = cluster.enrol(PEER, COORDINATOR, now=NOW + 16 * 86_400).certificate
    assert later is not None
    assert later.not_after > first.not_after
    other = cluster.enrol(OTHER, WORKER, now=NOW + 16 * 86_400).certificate
    assert other is not None
    assert (other.peer_id, other.role) == (OTHER, WORKER)
    cluster.revoke([PEER])
    with pytest.raises(ConfigurationError, match="revoked"):
        cluster.enrol(PEER, COORDINATOR)


def test_a_membership_is_resumed_in_its_own_cluster(cluster: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "member"
    wish = Membership.resume(directory, cluster.public_key)
    assert wish.certificate is None
    wish.take_certificate(cluster.issue(PEER, WORKER))
    assert Membership.resume(directory, cluster.public_key).certificate == wish.certificate
    other = Cluster.create(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="another directory"):
        Membership.resume(directory, other.public_key)
