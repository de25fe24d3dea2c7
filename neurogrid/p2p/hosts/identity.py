"""Identities: an Ed25519 key pair, whose public key is the peer id.

The file format is libp2p's own (a serialised `PrivateKey` protobuf), so the file can be used by other
libp2p programs. A new file is readable by its owner alone.

Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.serialization import deserialize_private_key
from libp2p.peer.id import ID

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.key_files import check_owner_alone

__all__ = ["Identity", "fingerprint_of", "is_signed_by", "short_peer_id", "signing_key"]

# A serialised Ed25519 key is 68 B; RSA keys of other programs take a few KiB.
MAX_IDENTITY_BYTES = 64 * 1024

# A peer id of an Ed25519 key is that key: identity multihash of 36 bytes, protobuf of type Ed25519, 32 bytes.
_ED25519_PEER_ID = b"\x00\x24\x08\x01\x12\x20"


@dataclass(frozen=True)
class Identity:
    """A key pair and the peer id that follows from it.

    Attributes:
        key_pair: the libp2p key pair; the private half stays out of `repr`.
        peer_id: the peer id in base58, as it stands in multiaddrs after `/p2p/`.
    """

    key_pair: KeyPair = field(repr=False)
    peer_id: str

    @classmethod
    def generate(cls) -> Identity:
        """Make a new Ed25519 identity that lives as long as the process."""
        return cls._of(create_new_key_pair())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read the identity in `path`, or create the file (mode 0600) with a new one.

        Raises:
            ConfigurationError: the file cannot be written; or as `read`.
        """
        identity = cls.read(path)
        if identity is not None:
            return identity
        identity = cls.generate()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, identity.key_pair.private_key.serialize())
        except OSError as exc:
            raise _unusable(path, exc) from exc
        return identity

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Read the identity in `path`; None if there is no such file.

        Raises:
            ConfigurationError: the file cannot be read, others than its owner can, or it holds no private key.
        """
        try:
            if not path.exists():
                return None
            check_owner_alone(path, "with which they could pass for this peer")
            with path.open("rb") as file:
                data = file.read(MAX_IDENTITY_BYTES + 1)
        except OSError as exc:
            raise _unusable(path, exc) from exc
        return cls._parse(path, data)

    @classmethod
    def _parse(cls, path: Path, data: bytes) -> Identity:
        if not 0 < len(data) <= MAX_IDENTITY_BYTES:
            raise ConfigurationError(
                f"{path} is not an identity file, {len(data)} B is no key's size: "
                "delete it to have a new one made, or name another"
            )
        try:
            private_key = deserialize_private_key(data)
        # libp2p raises whatever its protobuf and key libraries raise; the file is the only cause.
        except Exception as exc:
            raise ConfigurationError(
                f"{path} is not an identity file (a serialised libp2p private key): "
                "delete it to have a new one made, or name another"
            ) from exc
        return cls._of(KeyPair(private_key, private_key.get_public_key()))

    @classmethod
    def _of(cls, key_pair: KeyPair) -> Identity:
        return cls(key_pair=key_pair, peer_id=ID.from_pubkey(key_pair.public_key).to_base58())


def _make(path: Path, data: bytes) -> None:
    """Make a file (0600) that is not there: it is there whole, also where this process is killed meanwhile.

    Raises:
        OSError: it cannot be made, or another process has made it by now.
    """
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}-", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if path.exists():
                raise
            os.rename(new, path)
    finally:
        Path(new).unlink(missing_ok=True)


def _unusable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"cannot use the identity file {path}: {error.strerror}")


def signing_key(peer_id: str) -> Ed25519PublicKey:
    """The key that a peer id is, to check what that peer has signed.

    Raises:
        ConfigurationError: it is the id of another kind of key, or none at all.
    """
    try:
        encoded = ID.from_base58(peer_id).to_bytes()
    except ValueError as exc:
        raise ConfigurationError(f"{peer_id!r} is not a peer id") from exc
    if len(encoded) != 38 or not encoded.startswith(_ED25519_PEER_ID):
        raise ConfigurationError(f"{peer_id} is not the id of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(encoded[len(_ED25519_PEER_ID) :])


def fingerprint_of(peer_id: str) -> str:
    """The fingerprint of the key that a peer id is, as OpenSSH shows that of an Ed25519 key: `SHA256:` and base64.

    Short enough to be read to somebody; nobody can make another key with the same one.

    Raises:
        ConfigurationError: it is the id of another kind of key, or none at all.
    """
    fields = b"ssh-ed25519", signing_key(peer_id).public_bytes_raw()
    blob = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def is_signed_by(peer_id: str, signature: bytes, data: bytes) -> bool:
    """Whether a peer has signed this, by the key that its id is."""
    try:
        signing_key(peer_id).verify(signature, data)
    except (InvalidSignature, ConfigurationError):
        return False
    return True


def short_peer_id(peer_id: str) -> str:
    """The end of a peer id, for people: the beginning is the same for all Ed25519 keys."""
    return f"…{peer_id[-8:]}"
