"""Names of machines: which may be chosen, what is told by default, and how they stand beside peer ids."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.machine import MAX_NAMES, PeerNames, machine_name, named_peer
from neurogrid.p2p.wire import PROTOCOL_V11, Hello
from neurogrid.p2p.wire.limits import MAX_MACHINE_CHARS

PEER = "12D3KooW" + "A" * 43 + "Z"


@pytest.mark.parametrize("name", ["gpu-box", "Anna's Rechner", "μ", "m" * MAX_MACHINE_CHARS, ""])
def test_names_that_may_be_chosen(name: str) -> None:
    assert machine_name(name) == name


@pytest.mark.parametrize("name", ["m" * 33, " box", "box ", "a\nb", "a\x1b[2J", "a\u202eb", " "])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a machine"):
        machine_name(name)


@given(host=st.text(max_size=80))
def test_the_hosts_own_name_can_always_be_told(host: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        name = machine_name()
    assert len(name) <= MAX_MACHINE_CHARS
    assert machine_name(name) == name
    hello = Hello("worker", "test", (PROTOCOL_V11,), 2**20, 0, name)
    assert Hello.decode(hello.encode()).name == name


def test_the_default_is_the_name_up_to_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box.example.org")
    assert machine_name() == "gpu-box"


def test_a_peer_for_people() -> None:
    assert named_peer(PEER, "box", "10.0.0.7") == "box …AAAAAAAZ (10.0.0.7)"
    assert named_peer(PEER, "box") == "box …AAAAAAAZ"
    assert named_peer(PEER) == "…AAAAAAAZ"


def test_names_stand_beside_the_ids_that_a_line_has() -> None:
    names = PeerNames()
    names.note(PEER, "box", "10.0.0.7")
    other = PEER.replace("Z", "Y")
    assert names.beside_ids(f"lost {PEER}: it is silent") == f"lost {PEER} (box): it is silent"
    # What somebody may copy, and what nobody knows, stays as it is.
    for line in (f"/ip4/10.0.0.7/tcp/9000/p2p/{PEER}", f"--allow {PEER}=worker", f"lost {other}"):
        assert names.beside_ids(line) == line


def test_only_so_many_are_remembered() -> None:
    names = PeerNames()
    for number in range(MAX_NAMES + 1):
        names.note(str(number), f"box {number}", "")
    assert names.name_of("0") == ""
    assert names.of("1") == "box 1 …1"
    assert names.in_full(str(MAX_NAMES)) == f"box {MAX_NAMES} …{MAX_NAMES}"
