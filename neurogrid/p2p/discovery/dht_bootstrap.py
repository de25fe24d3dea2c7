"""Bootstrap peers: the ones that are named, through which all others are found.

They come from flags, a file and the environment, as full multiaddrs. There are no others: no public peer is built
in, so no network is joined that was not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.discovery.records import names_peer
from neurogrid.p2p.hosts.host import parse_peer_address

__all__ = ["BOOTSTRAP_VARIABLE", "by_peer", "parse_bootstrap", "read_bootstrap"]

BOOTSTRAP_VARIABLE: Final = "NEUROGRID_BOOTSTRAP"
"""The environment variable: addresses, separated by commas or white space."""

MAX_FILE_BYTES: Final = 64 * 1024
"""Bytes of a file of bootstrap peers: some hundred addresses with comments."""

MAX_BOOTSTRAP_PEERS: Final = 64
"""Peers to bootstrap from: each is kept connected, and a few do."""


def read_bootstrap(
    addresses: Iterable[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The bootstrap addresses that flags, files and the environment name, in this order, once each.

    `@FILE` in place of an address names a file of them: one a line; empty lines and what follows a `#` count for
    nothing.

    Raises:
        ConfigurationError: a file cannot be read, there are too many peers, or an address is none: one line of
            text for each, which says where it stands.
    """
    entries: list[tuple[str, str]] = []
    for number, text in enumerate(addresses, 1):
        if not text.startswith("@"):
            entries.append((f"bootstrap address {number}", text))
            continue
        for line_number, line in enumerate(_read(Path(text[1:])).splitlines(), 1):
            entries.append((f"{text[1:]}, line {line_number}", line.split("#", 1)[0].strip()))
    named = re.split(r"[\s,]+", (environment or {}).get(BOOTSTRAP_VARIABLE, ""))
    entries += [(BOOTSTRAP_VARIABLE, text) for text in named]
    good, errors = parse_bootstrap((where, text) for where, text in entries if text)
    if errors:
        raise ConfigurationError("\n".join(errors))
    if len(by_peer(good)) > MAX_BOOTSTRAP_PEERS:
        raise ConfigurationError(
            f"{len(by_peer(good))} bootstrap peers are too many: {MAX_BOOTSTRAP_PEERS} at most"
        )
    return good


def parse_bootstrap(
    entries: Iterable[tuple[str, str]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split (where it stands, address) into the addresses that are good, once each, and a text for each bad one."""
    good: dict[str, None] = {}
    errors: list[str] = []
    for where, text in entries:
        try:
            multiaddr, peer_id = parse_peer_address(text)
            if not names_peer(str(multiaddr), peer_id):
                raise ConfigurationError(f"{text!r} does not end in the peer id that it names")
        except ConfigurationError as exc:
            errors.append(f"{where}: {exc}")
        else:
            good[str(multiaddr)] = None
    return tuple(good), tuple(errors)


def by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """The addresses of each peer, in their order."""
    peers: dict[str, list[str]] = {}
    for address in addresses:
        peers.setdefault(address.rsplit("/p2p/", 1)[1], []).append(address)
    return peers


def _read(file: Path) -> str:
    if "\x00" in str(file):
        raise ConfigurationError(f"{str(file)!r} is no name of a file")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError(f"{file} is larger than {MAX_FILE_BYTES} bytes")
        return data.decode()
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read the bootstrap peers in {file}: {exc.strerror}"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file} is no text, so it names no bootstrap peers") from exc
