"""How a command is reached, from its command line: what is understood, and what is refused."""

from __future__ import annotations

import pytest

from neurogrid.cli.commands.worker import build_parser
from neurogrid.cli.options.reach import reaching
from neurogrid.errors import ConfigurationError
from neurogrid.node.reach_settings import ReachSettings

PEER = "12D3KooWSPLSpRUhJY58KpwPJLnctbeYrcXKMcEtbYzcvzsLsV8j"
RELAY = f"/ip4/203.0.113.9/tcp/9000/p2p/{PEER}"
PLACE = "/ip4/203.0.113.7/tcp/9000"
OPEN = ("/ip4/0.0.0.0/tcp/9000",)
LOOPBACK = ("/ip4/127.0.0.1/tcp/9000",)


def settings(*args: str, listen: tuple[str, ...] = OPEN) -> ReachSettings:
    return reaching(build_parser().parse_args(args), listen)


def test_nothing_is_done_that_was_not_asked_for() -> None:
    assert settings() == ReachSettings()


def test_all_that_can_be_asked_for() -> None:
    said = settings(
        *("--relay", RELAY, "--relay-service", "--announce", PLACE, "--keep-alive", "5"),
        *("--port-mapping", "--allow", f"{PEER}=coordinator"),
    )
    assert said == ReachSettings(
        relays=(RELAY,), relay_service=True, announce=(PLACE,), port_mapping=True, keep_alive=5
    )


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--relay", PLACE), "names no peer id"),
        (("--relay", f"{RELAY}/p2p-circuit/p2p/{PEER}"), "leads through a relay itself"),
        (("--announce", "elsewhere"), "expected /ip4/ADDRESS/tcp/PORT"),
        (("--announce", "/ip4/203.0.113.7/udp/9000"), "expected /ip4/ADDRESS/tcp/PORT"),
        (("--keep-alive", "0.5"), "at least 1 s"),
        (("--keep-alive", "nan"), "at least 1 s"),
        (("--keep-alive", "inf"), "at least 1 s"),
    ],
)
def test_what_cannot_be_is_refused(args: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        settings(*args)


def test_a_port_is_not_mapped_that_nobody_outside_can_use() -> None:
    with pytest.raises(ConfigurationError, match="loopback"):
        settings("--port-mapping", listen=LOOPBACK)


def test_that_everybody_is_let_in_is_said(caplog: pytest.LogCaptureFixture) -> None:
    settings("--port-mapping", "--insecure")
    assert "anybody on the internet" in caplog.text
