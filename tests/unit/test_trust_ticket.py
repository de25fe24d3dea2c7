"""Tickets as text: whole, cut, altered, expired."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust import WORKER, Cluster, Ticket, Whereabouts, read_ticket
from tests.unit.test_trust_formats import KEY, OTHER, PEER

ADDRESSES = [
    f"/ip4/192.168.1.5/tcp/9000/p2p/{PEER}",
    f"/ip4/192.168.1.5/udp/9000/quic-v1/p2p/{PEER}",
    f"/ip6/2001:db8::5/tcp/9000/p2p/{PEER}",
]
RELAYS = [f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER}"]
NOW = 1_800_000_000.0
CLUSTER = Cluster(Path("/nowhere"), KEY)
TICKET = CLUSTER.ticket(PEER, ADDRESSES, relays=RELAYS, now=NOW)
TEXT = TICKET.text()
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def refusal_of(text: str, now: float = NOW) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Ticket.parse(text, now=now)
    return str(caught.value)


def test_a_ticket_is_one_short_line() -> None:
    assert TEXT.startswith("ngt1")
    assert set(TEXT[4:]) <= set(ALPHABET)
    assert len(TEXT) < 600
    assert len(CLUSTER.ticket(PEER, ADDRESSES[:1], now=NOW).text()) < 450
    assert Ticket.parse(TEXT, now=NOW) == TICKET
    assert TICKET.addresses == tuple(ADDRESSES)
    assert TICKET.relays == tuple(RELAYS)
    assert TICKET.token.role == WORKER
    assert TICKET.cluster_id == CLUSTER.cluster_id
    assert KEY.private_bytes_raw() not in TEXT.encode()


def test_white_space_does_not_matter() -> None:
    wrapped = " \n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76))
    assert Ticket.parse(f"\t{wrapped}\n", now=NOW) == TICKET


def test_a_ticket_without_addresses() -> None:
    bare = CLUSTER.ticket(PEER, [], now=NOW)
    assert Ticket.parse(bare.text(), now=NOW) == bare


def test_every_cut_is_named() -> None:
    for length in range(4, len(TEXT)):
        assert "cut" in refusal_of(TEXT[:length])
    assert refusal_of(TEXT[:3]).startswith("this is no ticket") or "version" in refusal_of(TEXT[:3])


def test_the_number_of_missing_characters_is_right() -> None:
    assert "10 characters are missing" in refusal_of(TEXT[:-10])


def test_every_other_character_is_refused() -> None:
    for at in range(len(TEXT)):
        for bit in range(7):
            altered = TEXT[:at] + chr(ord(TEXT[at]) ^ 1 << bit) + TEXT[at + 1 :]
            assert "ticket" in refusal_of(altered)
    for at in range(4, len(TEXT)):
        altered = TEXT[:at] + ("a" if TEXT[at] != "a" else "b") + TEXT[at + 1 :]
        assert "altered" in refusal_of(altered)


def test_another_version_says_so() -> None:
    assert "another version" in refusal_of("ngt2" + TEXT[4:])


def test_an_expired_ticket_says_when_and_by_whose_clock() -> None:
    Ticket.parse(TEXT, now=NOW + 86_399)
    assert "expired at 2027-01-16 08:00:00 UTC" in refusal_of(TEXT, now=NOW + 86_400)
    said = refusal_of(TEXT, now=NOW + 3 * 86_400)
    assert "2 days ago, by the clock of" in said
    assert "set this machine's" in said


@given(text=st.text(max_size=200) | st.text(ALPHABET, max_size=200).map("ngt1".__add__))
def test_arbitrary_text_is_refused(text: str) -> None:
    refusal_of(text)


def test_a_long_text_is_refused_at_once() -> None:
    assert "at most 8192 characters" in refusal_of("ngt1" + "a" * 1_000_000)


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "/ip4/192.168.1.5/tcp/9000", f"/ip4/192.168.1.5/tcp/9000/p2p/{OTHER}"],
)
def test_addresses_must_lead_to_the_peer(address: str) -> None:
    with pytest.raises(ConfigurationError):
        CLUSTER.ticket(PEER, [address], now=NOW).text()


def test_too_many_addresses_are_refused() -> None:
    many = [f"/ip4/192.168.1.{n}/tcp/9000/p2p/{PEER}" for n in range(9)]
    with pytest.raises(ConfigurationError, match="at most 8"):
        CLUSTER.ticket(PEER, many, now=NOW).text()


def test_read_from_argument_file_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CLUSTER.ticket(PEER, ADDRESSES).text()
    file = tmp_path / "ticket"
    file.write_text(text + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
    for argument in (text, f"@{file}", "-"):
        assert read_ticket(argument).text() == text
    with pytest.raises(ConfigurationError, match="No such file"):
        read_ticket(f"@{tmp_path / 'none'}")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigurationError, match="no ticket"):
        read_ticket("-")


def test_where_a_host_is_becomes_addresses_and_relays(tmp_path: Path) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    assert cluster.whereabouts() is None
    direct = [f"/ip4/10.0.0.{number}/tcp/9000/p2p/{PEER}" for number in range(1, 12)]
    relays = [f"/ip4/10.1.0.{number}/tcp/4001/p2p/{OTHER}" for number in range(1, 7)]
    relayed = [f"{relay}/p2p-circuit/p2p/{PEER}" for relay in relays]
    where = Whereabouts.of(PEER, [relayed[0], *direct, *relayed, *direct], now=NOW)
    assert (where.addresses, where.relays) == (tuple(direct[:8]), tuple(relays[:4]))
    cluster.note_whereabouts(where)
    assert Cluster.load(cluster.directory).whereabouts() == where
    ticket = cluster.ticket(PEER, where.addresses, relays=where.relays, now=NOW)
    read = Ticket.parse(ticket.text(), now=NOW)
    assert read.whereabouts.dial_addresses == (*direct[:8], *relayed[:4])
    (cluster.directory / "whereabouts").write_bytes(b"\x81")
    with pytest.raises(ConfigurationError, match="whereabouts is damaged"):
        cluster.whereabouts()


@pytest.mark.parametrize("line", ["{}", " {}\n", "neurogrid-worker --join {}\n"])
def test_the_whole_line_may_be_read(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    text = cluster.ticket(PEER, [f"/ip4/10.0.0.1/tcp/9000/p2p/{PEER}"]).text()
    (tmp_path / "line").write_text(line.format(text))
    assert read_ticket(f"@{tmp_path / 'line'}").text() == text
    monkeypatch.setattr("sys.stdin", io.StringIO(line.format(text)))
    assert read_ticket("-").text() == text
