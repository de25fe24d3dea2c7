"""Policies: lists, roles, loopback; and what a log of refusals does not do."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust import (
    ANY_ROLE,
    COORDINATOR,
    WORKER,
    Admitted,
    AllowList,
    Cluster,
    ClusterAdmission,
    Insecure,
    LoopbackOnly,
    Membership,
    NotAdmittedError,
    Refusal,
    RefusedError,
    parse_allow,
)
from neurogrid.p2p.trust.limits import MAX_LOG_LINES
from neurogrid.p2p.trust.messages import Credentials
from neurogrid.p2p.trust.refusal_log import RefusalLog
from tests.unit.full_disk import full_disk
from tests.unit.test_trust_formats import OTHER, PEER

NOTHING = Credentials()
NOW = 1_800_000_000.0
ISSUER = Admitted(OTHER, COORDINATOR, is_issuer=True)


def reason_of(policy: AllowList | ClusterAdmission, peer_id: str, shown: Credentials) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        policy.judge(peer_id, shown)
    return caught.value.reason


@pytest.mark.parametrize("text", ["", PEER, f"{PEER}=", f"{PEER}=any", "=worker", f"{PEER}=a=b"])
def test_what_allows_nobody_says_so(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected PEER_ID=ROLE"):
        parse_allow(text)


def test_a_list_has_one_role_for_each_peer() -> None:
    assert parse_allow(f"{PEER}=worker") == (PEER, WORKER)
    policy = AllowList.parse([f"{PEER}=worker", f"{PEER}=worker", f"{OTHER}=coordinator"])
    assert policy.judge(PEER, NOTHING).role == WORKER
    assert policy.judge(OTHER, NOTHING).role == COORDINATOR
    with pytest.raises(ConfigurationError, match="as worker and as coordinator"):
        AllowList.parse([f"{PEER}=worker", f"{PEER}=coordinator"])
    with pytest.raises(ConfigurationError, match="expected PEER_ID=ROLE"):
        AllowList({PEER: "any"})


def test_a_list_admits_some_roles() -> None:
    policy = AllowList({PEER: WORKER, OTHER: COORDINATOR}, admits=[COORDINATOR])
    assert policy.unseen(OTHER) == policy.judge(OTHER, NOTHING)
    assert policy.unseen(PEER) is None
    assert reason_of(policy, PEER, NOTHING) is Refusal.ROLE_NOT_ADMITTED
    assert reason_of(policy, PEER[:-1] + "1", NOTHING) is Refusal.NOT_ON_LIST


def test_insecure_admits_anybody_as_anything() -> None:
    assert Insecure().judge(PEER, NOTHING).role == ANY_ROLE
    Insecure().check_listen(["/ip4/0.0.0.0/tcp/9000"])


@pytest.mark.parametrize(
    "address",
    ["/ip4/127.0.0.1/tcp/0", "/ip4/127.8.8.8/udp/1/quic-v1", "/ip6/::1/tcp/0", "/memory/1"],
)
def test_loopback_needs_no_permission(address: str) -> None:
    LoopbackOnly().check_listen([address])


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/0.0.0.0/tcp/9000",
        "/ip4/192.168.1.5/tcp/9000",
        "/ip6/::/tcp/9000",
        "/ip6/2001:db8::1/udp/1/quic-v1",
        "/dns4/localhost/tcp/9000",
        "nonsense",
    ],
)
def test_beyond_loopback_it_says_what_to_type(address: str) -> None:
    with pytest.raises(ConfigurationError, match="--insecure") as caught:
        LoopbackOnly().check_listen(["/ip4/127.0.0.1/tcp/0", address])
    assert address in str(caught.value)
    for option in ("--cluster", "--new-cluster", "--join", "--allow"):
        assert option in str(caught.value)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.create(tmp_path / "cluster")


def policy_of(cluster: Cluster, **options: object) -> ClusterAdmission:
    values: dict[str, object] = {"admits": [WORKER], "clock": lambda: NOW, **options}
    membership = Membership(cluster.public_key, cluster.issue(OTHER, COORDINATOR, now=NOW))
    return ClusterAdmission(membership, **values)  # type: ignore[arg-type]


def test_parts_of_different_clusters_do_not_fit(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster.create(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=other.cluster_id):
        policy_of(cluster, issuer=other)
    with pytest.raises(ConfigurationError, match=other.cluster_id):
        policy_of(cluster, ticket=other.ticket(PEER, []))
    for admits in ([], ["any"]):
        with pytest.raises(ConfigurationError, match="no roles"):
            policy_of(cluster, admits=admits)


def test_a_certificate_is_for_the_hosts_own_identity(cluster: Cluster) -> None:
    policy = policy_of(cluster)
    policy.bind(OTHER)
    with pytest.raises(ConfigurationError, match="--identity"):
        policy.bind(PEER)


def test_a_token_is_shown_to_its_issuer_alone(cluster: Cluster) -> None:
    ticket = cluster.ticket(OTHER, [], now=NOW)
    joining = ClusterAdmission(
        Membership(cluster.public_key), admits=[COORDINATOR], ticket=ticket, clock=lambda: NOW
    )
    assert joining.credentials(OTHER).token == ticket.token.data
    assert joining.credentials(PEER).token == b""
    joining.bind(PEER)
    joining.take_issued(cluster.issue(PEER, WORKER, now=NOW).data, ISSUER)
    assert joining.credentials(OTHER).token == b""


def test_a_certificate_of_another_peer_is_not_taken(cluster: Cluster) -> None:
    joining = ClusterAdmission(
        Membership(cluster.public_key), admits=[COORDINATOR], clock=lambda: NOW
    )
    joining.bind(PEER)
    with pytest.raises(RefusedError) as caught:
        joining.take_issued(cluster.issue(OTHER, WORKER, now=NOW).data, ISSUER)
    assert caught.value.reason is Refusal.WRONG_PEER
    assert joining.membership.certificate is None


def test_who_has_no_key_gives_nothing_for_a_token(cluster: Cluster) -> None:
    shown = Credentials(token=cluster.ticket(OTHER, [], now=NOW).token.data)
    assert reason_of(policy_of(cluster), PEER, shown) is Refusal.NO_ISSUER
    issuer = policy_of(cluster, issuer=cluster)
    admitted = issuer.judge(PEER, shown)
    assert admitted.role == WORKER
    assert admitted.issued
    coordinators_only = policy_of(cluster, issuer=cluster, admits=[COORDINATOR])
    assert reason_of(coordinators_only, PEER, shown) is Refusal.ROLE_NOT_ADMITTED


def test_a_directory_that_cannot_be_read_refuses_the_token(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Credentials(token=cluster.ticket(OTHER, [], max_uses=2, now=NOW).token.data)
    (cluster.directory / "token-uses").write_bytes(b"\xc1")
    with caplog.at_level(logging.ERROR):
        assert reason_of(policy_of(cluster, issuer=cluster), PEER, shown) is Refusal.NO_ISSUER
    assert "does not count uses" in caplog.text


def test_what_members_signed_can_be_verified_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    policy = policy_of(cluster, issuer=cluster)
    good = cluster.issue(PEER, WORKER, now=NOW).data
    policy.verify(PEER, WORKER, good)
    stranger = Cluster.create(tmp_path / "stranger").issue(PEER, WORKER, now=NOW).data
    old = cluster.issue(PEER, WORKER, now=NOW - 31 * 86_400).data
    for peer_id, certificate, reason in (
        (PEER, b"", Refusal.CERTIFICATE_REQUIRED),
        (OTHER, good, Refusal.WRONG_PEER),
        (PEER, stranger, Refusal.WRONG_CLUSTER),
        (PEER, old, Refusal.EXPIRED),
    ):
        with pytest.raises(RefusedError) as caught:
            policy.verify(peer_id, WORKER, certificate)
        assert caught.value.reason is reason
    with pytest.raises(RefusedError, match="it says that it is a coordinator"):
        policy.verify(PEER, COORDINATOR, good)
    cluster.revoke([PEER])
    policy.refresh()
    with pytest.raises(RefusedError) as caught:
        policy.verify(PEER, WORKER, good)
    assert caught.value.reason is Refusal.REVOKED


def test_only_what_is_half_used_up_is_renewed(cluster: Cluster) -> None:
    issuer = policy_of(cluster, issuer=cluster)
    for age, is_renewed in ((0.0, False), (14.0, False), (15.0, True)):
        old = cluster.issue(PEER, WORKER, now=NOW - age * 86_400)
        admitted = issuer.judge(PEER, Credentials(certificate=old.data, asks_renewal=True))
        assert bool(admitted.issued) == is_renewed
        assert (admitted.serial == old.serial) != is_renewed
        not_asked = issuer.judge(PEER, Credentials(certificate=old.data))
        assert not not_asked.issued


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "unreadable"])
def test_a_list_of_revocations_that_cannot_be_read_renews_nothing_and_ends_nothing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    half_used, gone = (cluster.issue(peer, WORKER, now=NOW - 15 * 86_400) for peer in (PEER, OTHER))
    asking, revoked = (
        Credentials(certificate=certificate.data, asks_renewal=True)
        for certificate in (half_used, gone)
    )
    issuer = policy_of(cluster, issuer=cluster)
    cluster.revoke([OTHER])
    issuer.refresh()
    path = cluster.directory / "revocations"
    kept = path.read_bytes()
    path.unlink()
    if is_damaged:
        path.write_bytes(kept[:-1])
    else:
        path.mkdir()
    for _ in range(3):
        admitted = issuer.judge(PEER, asking)
        assert (admitted.serial, admitted.issued) == (half_used.serial, b"")
        assert reason_of(issuer, OTHER, revoked) is Refusal.REVOKED
        assert not issuer.refresh()
    assert caplog.text.count("cannot tell who was revoked") == 1
    path.unlink() if is_damaged else path.rmdir()
    path.write_bytes(kept)
    issuer.refresh()
    assert issuer.judge(PEER, asking).issued


def test_a_list_of_revocations_is_learned_from_members_and_never_older(cluster: Cluster) -> None:
    first, second = cluster.revoke([PEER]), cluster.reinstate([PEER])
    policy = policy_of(cluster)
    changes: list[str] = []
    policy.on_change(lambda: changes.append("changed"))
    shown = Credentials(certificate=cluster.issue(PEER, WORKER, now=NOW).data)
    newer = Credentials(certificate=shown.certificate, revocations=second.data)
    older = Credentials(certificate=shown.certificate, revocations=first.data)
    assert policy.judge(PEER, newer).role == WORKER
    assert policy.judge(PEER, older).role == WORKER
    assert policy.membership.revocations == second
    assert changes == ["changed"]
    stranger = Credentials(revocations=first.data)
    assert reason_of(policy, PEER, stranger) is Refusal.CERTIFICATE_REQUIRED


def test_on_a_full_disk_nobody_joins_by_a_counted_ticket(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Credentials(token=cluster.ticket(OTHER, [], max_uses=1, now=NOW).token.data)
    policy = policy_of(cluster, issuer=cluster)
    with full_disk():
        assert reason_of(policy, PEER, shown) is Refusal.NO_ISSUER
    assert "cannot write" in caplog.text
    # It was neither given nor counted.
    assert policy.judge(PEER, shown).issued
    assert reason_of(policy, OTHER, shown) is Refusal.TOKEN_USED_UP


def test_a_revocation_that_cannot_be_written_is_in_force_and_written_later(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(cluster.directory, tmp_path / "copy")
    copy = Cluster.load(tmp_path / "copy")
    policy = ClusterAdmission(
        copy.enrol(OTHER, COORDINATOR, now=NOW), admits=[WORKER], issuer=copy, clock=lambda: NOW
    )
    revoked = Credentials(certificate=cluster.issue(PEER, WORKER, now=NOW).data)
    bearer = cluster.issue(OTHER, WORKER, now=NOW).data
    news = Credentials(certificate=bearer, revocations=cluster.revoke([PEER]).data)
    with full_disk():
        assert policy.judge(OTHER, news).role == WORKER
        assert reason_of(policy, PEER, revoked) is Refusal.REVOKED
        policy.refresh()
        assert reason_of(policy, PEER, revoked) is Refusal.REVOKED
    assert "the revocations will be lost when this host ends" in caplog.text
    assert not copy.revocations().version
    policy.refresh()
    assert copy.revocations().peer_ids == {PEER}
    assert Membership.load(copy.directory).revocations.peer_ids == {PEER}


def test_a_certificate_that_cannot_be_written_is_used_and_written_later(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticket = cluster.ticket(OTHER, [], now=NOW)
    membership = Membership(cluster.public_key, directory=tmp_path)
    policy = ClusterAdmission(membership, admits=[COORDINATOR], ticket=ticket, clock=lambda: NOW)
    policy.bind(PEER)
    given = cluster.issue(PEER, WORKER, now=NOW)
    with full_disk():
        policy.take_issued(given.data, ISSUER)
        policy.refresh()
    assert membership.certificate == given
    assert "the certificate will be lost when this host ends" in caplog.text
    policy.refresh()
    assert Membership.load(tmp_path).certificate == given


def test_a_refusal_is_logged_once_and_a_flood_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = RefusalLog(logging.getLogger("test"), lambda: now[0])
    with caplog.at_level(logging.WARNING, "test"):
        for _ in range(100):
            log.refused("peer", Refusal.EXPIRED, "too late")
        assert len(caplog.records) == 1
        log.refused("peer", Refusal.REVOKED, "gone")
        assert len(caplog.records) == 2
        for number in range(1000):
            log.refused(f"peer {number}", Refusal.EXPIRED, "too late")
        assert len(caplog.records) == MAX_LOG_LINES
        now[0] = 61.0
        log.refused("another", Refusal.EXPIRED, "too late")
        assert f"and {1002 - MAX_LOG_LINES} more refusals" in caplog.text
        now[0] = 4000.0
        caplog.clear()
        log.refused("peer", Refusal.EXPIRED, "too late")
        assert len(caplog.records) == 1


def test_an_error_says_who_refused_whom() -> None:
    theirs = NotAdmittedError(PEER, Refusal.EXPIRED, "too late", refused_by_peer=True)
    ours = NotAdmittedError(PEER, Refusal.EXPIRED, "too late", refused_by_peer=False)
    assert str(theirs) == f"{PEER} refused us: too late"
    assert str(ours) == f"refused {PEER}: too late"
    assert not theirs.retryable
