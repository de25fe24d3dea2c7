"""`neurogrid identity`: who a peer is, where its key lies, and what it is a member of; never the key."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from neurogrid.cli.commands.main import main
from neurogrid.p2p.hosts.identity import Identity, fingerprint_of, signing_key
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    Membership,
    StandingState,
    Whereabouts,
    standing_of,
)

DAY = 86_400.0
ADDRESS = "/ip4/192.0.2.1/tcp/9000"


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["identity", *map(str, words), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["identity", *map(str, words)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


def member_of(cluster: Cluster, directory: Path, **when: float) -> Membership:
    """A worker that has joined a cluster, in its directory."""
    identity = Identity.load(directory / "identity.key")
    membership = Membership.resume(directory, cluster.public_key)
    membership.take_certificate(cluster.issue(identity.peer_id, WORKER, **when))
    return membership


def test_a_new_identity_is_made_once_and_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "member"
    assert "--new does now" in refused(capsys, directory)
    assert not directory.exists()
    made = told(capsys, directory, "--new")
    file = directory / "identity.key"
    assert (file.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
    assert made["file"] == str(file)
    assert made["membership"] is None
    assert "is there already" in refused(capsys, directory, "--new")
    assert told(capsys, directory) == made
    assert told(capsys, "--identity", file)["peer_id"] == made["peer_id"]
    # What a worker with this directory is known by.
    assert Identity.load(file).peer_id == made["peer_id"]


def test_nothing_of_the_private_key_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "identity.key"
    key = Identity.load(file).key_pair.private_key
    secrets = (key.to_bytes(), key.serialize())
    for words in ((), ("--json",), ("--log-level", "debug")):
        assert main(["identity", str(tmp_path), *words]) == 0
        written = capsys.readouterr()
        for secret in secrets:
            for form in (secret.hex(), base64.b64encode(secret).decode()):
                assert form not in written.out + written.err


def test_the_fingerprint_is_that_of_openssh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = told(capsys, tmp_path, "--new")
    line = signing_key(shown["peer_id"]).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    blob = base64.b64decode(line.split()[1])
    wanted = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    assert shown["fingerprint"] == fingerprint_of(shown["peer_id"]) == f"SHA256:{wanted}"


def test_a_member_is_told_its_cluster_role_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    member_of(cluster, tmp_path / "member", lifetime=20 * DAY)
    leader = Identity.generate().peer_id
    Whereabouts.of(leader, [f"{ADDRESS}/p2p/{leader}"]).write(tmp_path / "member")
    shown = told(capsys, tmp_path / "member")
    member = shown["membership"]
    assert (member["state"], member["role"]) == ("valid", "worker")
    assert member["cluster_id"] == cluster.cluster_id
    assert 19.9 * DAY < member["not_after"] - time.time() <= 20 * DAY
    assert (member["coordinator"], member["addresses"]) == (leader, [f"{ADDRESS}/p2p/{leader}"])
    assert not shown["makes_members"]
    assert main(["identity", str(tmp_path / "member")]) == 0
    lines = capsys.readouterr().out
    assert f"of cluster {cluster.cluster_id}, as worker, until " in lines
    assert "(for 20 days; renewed by itself)" in lines


def test_the_leader_of_a_run_is_found_by_the_directory_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "run"
    cluster = Cluster.create(run / "cluster")
    identity = Identity.load(run / "cluster" / "identity.key")
    cluster.enrol(identity.peer_id, COORDINATOR)
    shown = told(capsys, run)
    assert shown["peer_id"] == identity.peer_id
    assert shown["makes_members"]
    assert shown["membership"]["role"] == "coordinator"


def test_what_is_wrong_with_a_membership_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    now = time.time()

    def said(directory: str) -> str:
        assert main(["identity", str(tmp_path / directory)]) == 0
        return capsys.readouterr().out

    member_of(cluster, tmp_path / "old", now=now - 60 * DAY, lifetime=30 * DAY)
    assert "no more: " in said("old")
    member_of(cluster, tmp_path / "early", now=now + 3 * DAY)
    assert " on: in 3 days" in said("early")
    wished = tmp_path / "wished"
    Identity.load(wished / "identity.key")
    Membership.resume(wished, cluster.public_key).save()
    assert "no certificate yet" in said("wished")
    member_of(cluster, tmp_path / "other")
    (tmp_path / "other" / "identity.key").unlink()
    Identity.load(tmp_path / "other" / "identity.key")
    assert "put the key back" in said("other")
    revoked = member_of(cluster, tmp_path / "revoked")
    assert revoked.certificate is not None
    revoked.take_revocations(cluster.revoke([revoked.certificate.peer_id]))
    assert "until it was revoked" in said("revoked")


@pytest.mark.parametrize(
    ("after", "state"),
    [
        (-1.0, StandingState.NOT_YET_VALID),
        (0.0, StandingState.VALID),
        (DAY - 1, StandingState.VALID),
        (DAY, StandingState.EXPIRED),
    ],
)
def test_a_standing_goes_by_the_times_of_the_certificate(
    tmp_path: Path, after: float, state: StandingState
) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    membership = member_of(cluster, tmp_path / "member", now=1_700_000_000.0, lifetime=DAY)
    assert membership.certificate is not None
    peer_id = membership.certificate.peer_id
    assert standing_of(membership, peer_id, now=1_700_000_000.0 + after).state is state


def test_what_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name the directory" in refused(capsys)
    file = tmp_path / "identity.key"
    file.write_bytes(b"no key")
    file.chmod(0o600)
    assert "--identity names one" in refused(capsys, file)
    assert "is not an identity file" in refused(capsys, tmp_path)
    Identity.load(tmp_path / "open" / "identity.key")
    (tmp_path / "open" / "identity.key").chmod(0o644)
    assert "chmod 600" in refused(capsys, tmp_path / "open")
