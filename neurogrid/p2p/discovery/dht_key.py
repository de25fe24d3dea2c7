"""The key of a cluster in the DHT, under which its members announce themselves.

A cluster is a namespace, any short text. Its key is a multihash, since go-libp2p and js-libp2p keep provider
records under nothing else; they are asked by the CID that has the same multihash.

Source: `protocol_spec/discovery.md`; the multihash and CID specifications.
"""

from __future__ import annotations

import hashlib
from typing import Final

from neurogrid.errors import ConfigurationError

__all__ = ["CLUSTER_KEY_BYTES", "MAX_NAMESPACE_BYTES", "cluster_cid", "cluster_key"]

# So that no file, and no namespace of another program, has the key of a cluster.
_DOMAIN: Final = b"neurogrid/cluster/1\x00"
_SHA2_256_OF_32_BYTES: Final = b"\x12\x20"
_CID_V1_RAW: Final = b"\x01\x55"

CLUSTER_KEY_BYTES: Final = 34
"""Bytes of a key: the code of SHA2-256, its length, and the digest."""

MAX_NAMESPACE_BYTES: Final = 256
"""UTF-8 bytes of a namespace: a peer id has 52, a name some tens."""


def cluster_key(namespace: str) -> bytes:
    """The key of a cluster, 34 bytes: the SHA2-256 multihash of the domain and the namespace.

    Raises:
        ConfigurationError: the namespace is empty, or longer than `MAX_NAMESPACE_BYTES`.
    """
    encoded = namespace.encode()
    if not 0 < len(encoded) <= MAX_NAMESPACE_BYTES:
        raise ConfigurationError(
            f"the name of a cluster has 1 to {MAX_NAMESPACE_BYTES} bytes, not {len(encoded)}"
        )
    return _SHA2_256_OF_32_BYTES + hashlib.sha256(_DOMAIN + encoded).digest()


def cluster_cid(namespace: str) -> bytes:
    """The CID by which other implementations ask for the members: version 1, raw, with `cluster_key`."""
    return _CID_V1_RAW + cluster_key(namespace)
