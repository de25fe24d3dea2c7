"""The roles in which a peer may send each message: a table for each side of each protocol.

A role comes from the peer's admission (its certificate, or the list that it is on), never from what its Hello says.
Answers are not in the tables: they count from the peer that was asked, and from no other. What a peer may do with
a session, a transfer or a model of another peer is decided where that is held.

Source: protocol_spec/security.md, "What a peer may do".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.trust import ANY_ROLE, COORDINATOR, WORKER
from neurogrid.p2p.wire import ErrorCode, MessageCode, MessageType, TensorMessage

__all__ = ["COORDINATOR_TAKES", "WORKER_TAKES", "Table", "authorise", "require_role"]

Table = Mapping[MessageCode, frozenset[str]]
"""The roles that each message of a protocol is taken from; a role is any that an admission can give."""

_COORDINATORS: Final = frozenset({COORDINATOR})
_WORKERS: Final = frozenset({WORKER})
_MEMBERS: Final = frozenset({COORDINATOR, WORKER})

WORKER_TAKES: Final[Table] = {
    MessageType.MODEL_CONFIG: _COORDINATORS,
    MessageType.ASSIGN: _COORDINATORS,
    MessageType.SESSION_OPEN: _COORDINATORS,
    MessageType.SESSION_CLOSE: _COORDINATORS,
    MessageType.SESSION_QUERY: _COORDINATORS,
    # A route names the worker that hands on; the session knows it.
    MessageType.ACTIVATION: _MEMBERS,
    MessageType.TRACED_ACTIVATION: _MEMBERS,
    # A blob that this worker has asked for may come from any member, any other from its coordinator alone:
    # `TransferService.authorize` tells them apart.
    MessageType.TRANSFER_REQUEST: _MEMBERS,
    MessageType.TRANSFER_OFFER: _MEMBERS,
    MessageType.WEIGHTS: _MEMBERS,
    # With ids, of the coordinator that is served alone.
    MessageType.LAYER_REQUEST: _MEMBERS,
    MessageType.GPU_INFO_REQUEST: _MEMBERS,
    # The worker measures itself for it.
    MessageType.DEVICE_INFO_REQUEST: _COORDINATORS,
}
"""The roles that a worker takes each message from."""

COORDINATOR_TAKES: Final[Table] = {
    # Announcements: with RequestID 0, asked by nobody.
    MessageType.LAYER_STATUS: _WORKERS,
    MessageType.GPU_INFO: _WORKERS,
    MessageType.TRANSFER_REQUEST: _WORKERS,
}
"""The roles that a coordinator takes each message from."""


def authorise(exchange: Exchange, table: Table) -> None:
    """Hold an exchange to a table: other messages, and those of other roles, are refused with UNAUTHORIZED.

    Where nobody decides on roles (`--insecure`, loopback), everybody may send what anybody may.
    """

    def check(message: TensorMessage) -> None:
        # Legacy messages have no type; nobody serves them.
        if message.msg_type is not None and message.from_peer is not None:
            allowed = table.get(message.msg_type, frozenset())
            require_role(exchange.host, message.from_peer, allowed, what=message.msg_type)

    exchange.authorise_by(check)


def require_role(
    host: Host, peer_id: str, roles: Collection[str], *, what: MessageCode | str
) -> None:
    """Check that a peer has one of `roles`, or that nobody decides on them.

    Raises:
        RequestRefusedError: it has another, or none (UNAUTHORIZED).
    """
    role = host.role_of(peer_id)
    if role == ANY_ROLE or role in roles or peer_id == host.peer_id:
        return
    name = what.name if isinstance(what, MessageCode) else what
    raise RequestRefusedError(
        f"{name} is taken from {', '.join(sorted(roles)) or 'nobody'}, and the sender "
        f"{f'is a {role}' if role else 'is not admitted'}",
        code=ErrorCode.UNAUTHORIZED,
    )
