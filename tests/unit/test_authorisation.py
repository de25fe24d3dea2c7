"""Who may send what: the tables, against the specification's, for every type and every role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.node.roles import COORDINATOR_TAKES, WORKER_TAKES, authorise
from neurogrid.p2p import Identity, MessageType, Protocol, TensorMessage
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.trust import AllowList, Insecure
from neurogrid.p2p.wire import ErrorCode

SPECIFICATION = Path(__file__).parents[2] / "protocol_spec" / "security.md"
ROLES = ("coordinator", "worker", "trainer")
ANSWERS = {
    MessageType.RESPONSE,
    MessageType.TRACED_RESPONSE,
    MessageType.WEIGHTS_ACK,
    MessageType.CONFIG_ACK,
    MessageType.ASSIGN_ACK,
    MessageType.TRANSFER_ACCEPT,
    MessageType.READY,
    MessageType.SESSION_ACK,
    MessageType.DEVICE_INFO,
}
OF_THE_STREAM = {MessageType.HELLO, MessageType.ERROR, MessageType.CREDIT}
REQUESTS = [
    kind
    for kind in MessageType
    if kind not in ANSWERS | OF_THE_STREAM | {MessageType.LAYER_STATUS, MessageType.GPU_INFO}
]


def specified() -> Iterator[tuple[MessageType, set[str], set[str]]]:
    """The rows of the specification: a type, who may send it to a worker, and to a coordinator."""
    names = {kind.name.replace("_", "").lower(): kind for kind in MessageType}
    text = SPECIFICATION.read_text().partition("| message | to a worker")[2].partition("\n\n")[0]
    for line in text.splitlines()[2:]:
        cells = [cell.strip() for cell in line.split("|")[1:4]]
        roles = [{role for role in ROLES if role in cell} for cell in cells[1:]]
        for word in re.findall(r"[A-Z]\w+", cells[0]):
            if word.lower() in names and "any" not in cells[1]:
                yield names[word.lower()], *roles


def test_the_tables_are_those_of_the_specification() -> None:
    rows = list(specified())
    assert {kind for kind, _, _ in rows} == {
        *REQUESTS,
        MessageType.LAYER_STATUS,
        MessageType.GPU_INFO,
    }
    for kind, to_worker, to_coordinator in rows:
        assert WORKER_TAKES.get(kind, frozenset()) == to_worker, kind
        assert COORDINATOR_TAKES.get(kind, frozenset()) == to_coordinator, kind


@pytest.mark.parametrize("table", [WORKER_TAKES, COORDINATOR_TAKES], ids=["worker", "coordinator"])
def test_each_type_is_refused_to_other_roles(table: dict[MessageType, frozenset[str]]) -> None:
    senders = {role: Identity.generate() for role in ROLES}
    listed = {identity.peer_id: role for role, identity in senders.items()}

    async def scenario() -> None:
        async with (
            open_memory_network() as network,
            network.open_host(admission=AllowList(listed)) as host,
            network.open_host(admission=Insecure()) as open_to_all,
            network.open_host(identity=senders["coordinator"]) as coordinator,
            network.open_host(identity=senders["worker"]) as worker,
            network.open_host(identity=senders["trainer"]) as trainer,
        ):
            protocols = [Protocol(host), Protocol(open_to_all)]
            for protocol in protocols:
                authorise(protocol, table)
            for sender in (coordinator, worker, trainer):
                for protocol in protocols:
                    await sender.connect(protocol.host.addresses[0])
            for kind in MessageType:
                for role, identity in senders.items():
                    message = TensorMessage(msg_type=kind, from_peer=identity.peer_id)
                    protocols[1]._dispatcher.authorise(message)
                    if role in table.get(kind, ()):
                        protocols[0]._dispatcher.authorise(message)
                        continue
                    with pytest.raises(RequestRefusedError, match=f"is a {role}") as caught:
                        protocols[0]._dispatcher.authorise(message)
                    assert caught.value.code == ErrorCode.UNAUTHORIZED
            stranger = TensorMessage(
                msg_type=MessageType.ACTIVATION, from_peer=Identity.generate().peer_id
            )
            with pytest.raises(RequestRefusedError, match="is not admitted"):
                protocols[0]._dispatcher.authorise(stranger)

    trio.run(scenario)
