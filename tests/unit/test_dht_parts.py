"""Bootstrap lists, the mode, and the key: what is decided before anything is sent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.discovery.dht_bootstrap import BOOTSTRAP_VARIABLE, by_peer, read_bootstrap
from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.dht_mode import serves
from neurogrid.p2p.hosts.identity import Identity

ONE, TWO = Identity.generate().peer_id, Identity.generate().peer_id
FIRST = f"/ip4/192.0.2.1/tcp/4001/p2p/{ONE}"
SECOND = f"/dns4/example.org/tcp/4001/p2p/{TWO}"
THIRD = f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{ONE}"


def test_addresses_come_from_flags_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text(f"# ours\n\n  {SECOND}  # the other one\n{FIRST}\n")
    environment = {BOOTSTRAP_VARIABLE: f" {THIRD},{FIRST}\n", "OTHER": "x"}
    addresses = read_bootstrap([FIRST, f"@{file}"], environment=environment)
    assert addresses == (FIRST, SECOND, THIRD)
    assert by_peer(addresses) == {ONE: [FIRST, THIRD], TWO: [SECOND]}


def test_each_bad_line_has_a_text_that_says_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text(f"{FIRST}\nexample.org:4001\n/ip4/192.0.2.1/tcp/4001\n")
    with pytest.raises(ConfigurationError) as caught:
        read_bootstrap(["nonsense", f"@{file}"], environment={BOOTSTRAP_VARIABLE: "more"})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "bootstrap address 1",
        f"{file}, line 2",
        f"{file}, line 3",
        BOOTSTRAP_VARIABLE,
    ]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_bootstrap([f"@{tmp_path}/missing"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="no text"):
        read_bootstrap([f"@{tmp_path}/binary"])
    (tmp_path / "large").write_bytes(b"#" * 70_000)
    with pytest.raises(ConfigurationError, match="larger"):
        read_bootstrap([f"@{tmp_path}/large"])


@given(st.lists(st.text(max_size=80), max_size=5))
def test_any_text_is_an_address_or_a_configuration_error(texts: list[str]) -> None:
    with suppress(ConfigurationError):
        assert all("/p2p/" in address for address in read_bootstrap(texts))


PRIVATE, PUBLIC = "/ip4/192.168.1.5/tcp/1", "/ip4/8.8.8.8/tcp/1"


@pytest.mark.parametrize(
    ("mode", "is_reachable", "own", "bootstrap", "expected"),
    [
        ("server", False, [PRIVATE], [PUBLIC], True),
        ("client", True, [PUBLIC], [PUBLIC], False),
        ("auto", True, [PRIVATE], [PUBLIC], True),
        ("auto", False, [PUBLIC], [PRIVATE], False),
        ("auto", None, [PRIVATE], [PRIVATE], True),
        ("auto", None, [PRIVATE], [PUBLIC], False),
        ("auto", None, [PRIVATE], ["/dns4/example.org/tcp/1"], False),
        ("auto", None, [PRIVATE, PUBLIC], [PUBLIC], True),
        ("auto", None, [f"{PUBLIC}/p2p/x/p2p-circuit"], [PUBLIC], False),
        ("auto", True, [], [], False),
    ],
)
def test_who_serves(
    mode: str, is_reachable: bool | None, own: list[str], bootstrap: list[str], expected: bool
) -> None:
    served = serves(mode, is_reachable=is_reachable, own=own, bootstrap=bootstrap)  # type: ignore[arg-type]
    assert served is expected


@pytest.mark.parametrize("namespace", ["", "x" * 257, "é" * 129])
def test_a_name_that_is_none(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 256 bytes"):
        cluster_key(namespace)
