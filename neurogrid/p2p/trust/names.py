"""Peer ids and roles as text, checked; the roles that NeuroGrid itself gives out."""

from __future__ import annotations

import re
from typing import Final

from neurogrid.p2p.trust.limits import MAX_PEER_ID_CHARS, MAX_ROLE_CHARS

__all__ = [
    "ANY_ROLE",
    "COORDINATOR",
    "RUN_ROLES",
    "TRAINER",
    "WORKER",
    "is_peer_id",
    "is_role",
]

COORDINATOR: Final = "coordinator"
"""The role of peers that put a model on workers and ask them to compute."""

WORKER: Final = "worker"
"""The role of peers that hold layers and compute with them."""

TRAINER: Final = "trainer"
"""The role of peers that are members of training runs, and hold no layers of models that are served."""

RUN_ROLES: Final = frozenset({WORKER, TRAINER})
"""The roles of members of training runs."""

ANY_ROLE: Final = "any"
"""The role of peers where nobody decides: each may act as anything. No certificate can name it."""

_ROLE = re.compile(rf"[a-z][a-z0-9-]{{0,{MAX_ROLE_CHARS - 1}}}")
_BASE58 = re.compile(rf"[1-9A-HJ-NP-Za-km-z]{{8,{MAX_PEER_ID_CHARS}}}")


def is_role(text: str) -> bool:
    """Whether a certificate can name this role: the set is open, the form is not."""
    return _ROLE.fullmatch(text) is not None and text != ANY_ROLE


def is_peer_id(text: str) -> bool:
    """Whether this has the form of a peer id in base58; whose key it is, a connection proves."""
    return _BASE58.fullmatch(text) is not None
