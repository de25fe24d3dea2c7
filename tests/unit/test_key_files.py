"""Identities on disk: made for their owner alone, and refused where others can read or write them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p import Identity


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o602])
def test_an_identity_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode is {mode:04o} .* 0600: chmod 600 {path}"):
        Identity.load(path)
    path.chmod(0o400)
    assert Identity.load(path).peer_id == made.peer_id


def test_a_directory_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot use the identity file"):
        Identity.load(tmp_path)


def test_a_kill_while_an_identity_is_made_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is there and empty would be in the way of each start after that."""

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> NoReturn:
        raise Killed

    path = tmp_path / "identity.key"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", kill)
        with pytest.raises(Killed):
            Identity.load(path)
    made = Identity.load(path)
    assert Identity.load(path) == made
    assert [each.name for each in tmp_path.iterdir()] == ["identity.key"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_identity_is_made_where_files_have_no_second_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    made = Identity.load(tmp_path / "identity.key")
    assert Identity.read(tmp_path / "identity.key") == made


def test_of_two_processes_that_make_an_identity_at_once_the_second_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "identity.key"
    first = Identity.load(path)
    monkeypatch.setattr(Identity, "read", classmethod(lambda cls, path: None))  # as it was before
    with pytest.raises(ConfigurationError, match="File exists"):
        Identity.load(path)
    monkeypatch.undo()
    assert Identity.read(path) == first
