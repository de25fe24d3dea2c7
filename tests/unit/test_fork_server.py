"""What the fork server does with an order that it cannot carry out."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from neurogrid import fork_server


@pytest.mark.parametrize("where", ["disk", "processes"])
def test_a_child_that_cannot_be_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Those that run would end with the fork server: a trainer, when a model is to be tried that a peer sent."""

    def no_room(**_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    def no_process() -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if where == "disk":
        monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    else:
        monkeypatch.setattr(os, "fork", no_process)
    children: dict[int, Any] = {1: "another"}
    control, orders = socket.socketpair()
    own, others = socket.socketpair()
    told, pipe = os.pipe()
    order = json.dumps(["module:main", [], {}, True]).encode().ljust(fork_server._ORDER_BYTES)
    with control, orders, own:
        with others:
            socket.send_fds(orders, [order], [others.fileno(), pipe])
        os.close(pipe)
        assert fork_server._take_order(control, children)
        own.settimeout(5)
        assert own.recv(1) == b""
        assert os.read(told, 1) == b""
        os.close(told)
    assert children == {1: "another"}
    assert list(tmp_path.iterdir()) == []
