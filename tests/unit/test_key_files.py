"""Identities on disk: made for their owner alone, and refused where others can read or write them."""

from __future__ import annotations

from pathlib import Path

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
