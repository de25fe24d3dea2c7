"""Obedience of a member: to its leader, and to the deputy that it promised to obey when that asks.

`runs.terms` decides whom to obey; here promises are signed, and the deputy is kept within reach.

Source: protocol_spec/training/terms.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import own_addresses, parse_peer_address
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.runs.terms import Place, Standing, Voter, promise_bytes
from neurogrid.training.wire.runs import Appoint, Appointed, Claim, Claimed, RunMessage

__all__ = ["Obedience", "refuse_other_run"]

logger = logging.getLogger(__name__)

# Seconds between two attempts to reach the deputy, and for each.
_PAUSE: Final = 1.0
_DIAL_TIMEOUT: Final = 10.0


class Obedience:
    """Obedience of a member to one leader at a time, in one run. Keep `keep_near` running.

    Args:
        exchange: of runs.
        run: its id, 16 bytes.
        leader: the peer id of who has started this member.
        incarnation: tells the member's own in the group; 0 while it has none.
        on_new_leader: is called with the old leader and the new one, when this member has promised.
    """

    def __init__(
        self,
        exchange: Exchange,
        run: bytes,
        leader: str,
        incarnation: Callable[[], int],
        on_new_leader: Callable[[str, str], None],
    ) -> None:
        self._exchange, self._run = exchange, run
        self._incarnation, self._on_new_leader = incarnation, on_new_leader
        self._voter = Voter(leader)
        self._addresses: tuple[str, ...] = ()
        # Of the leader, where that was a deputy when this member was started.
        self._leader_addresses: tuple[str, ...] = ()
        self._changed = RenewedEvent()

    @property
    def leader(self) -> str:
        """The peer id of whom it obeys."""
        return self._voter.standing.leader

    def obeys(self, sender: str, term: int) -> bool:
        """Whether to do what somebody orders in a term."""
        old = self._voter.standing.leader
        obeys = self._voter.obeys(sender, term)
        self._note_leader(old)
        return obeys

    async def take_appoint(self, message: TensorMessage, appoint: Appoint) -> None:
        """A leader says who its deputy is."""
        before = self._voter.standing
        standing = self._voter.appointed(
            sender_of(message), appoint.term, appoint.number, appoint.deputy
        )
        self._note_leader(before.leader)
        if standing.number != before.number:
            self._addresses = own_addresses(appoint.addresses, appoint.deputy)
            self._changed.set()
            logger.info("the leader's deputy is %s", appoint.deputy or "nobody")
        answer = Appointed(
            run=self._run,
            leader=standing.leader,
            incarnation=self._incarnation(),
            term=standing.term,
            number=standing.number,
            deputy=standing.deputy,
        )
        await self._answer(message, RunMessage.APPOINTED, answer.encode())

    async def take_claim(self, message: TensorMessage, claim: Claim) -> None:
        """A deputy asks for a term."""
        old = self._voter.standing.leader
        standing = self._voter.claimed(
            sender_of(message), claim.term, Place(claim.line, claim.digest)
        )
        self._note_leader(old)
        await self._answer(message, RunMessage.CLAIMED, self._claimed(standing).encode())

    def _note_leader(self, old: str) -> None:
        standing = self._voter.standing
        if standing.leader != old:
            logger.warning("%s leads from here on, in term %d", standing.leader, standing.term)
            self._leader_addresses, self._addresses = self._addresses, ()
            self._on_new_leader(old, standing.leader)

    def _claimed(self, standing: Standing) -> Claimed:
        place = standing.place or Place()
        incarnation = self._incarnation()
        signature = b""
        if standing.place is not None:
            said = promise_bytes(self._run, standing.term, standing.leader, incarnation, place)
            signature = self._exchange.host.identity.key_pair.private_key.sign(said)
        return Claimed(
            run=self._run,
            leader=standing.leader,
            incarnation=incarnation,
            term=standing.term,
            number=standing.number,
            deputy=standing.deputy,
            line=place.line,
            digest=place.digest,
            signature=signature,
        )

    async def _answer(self, message: TensorMessage, code: RunMessage, data: bytes) -> None:
        answer = TensorMessage(code, request_id=message.request_id, data=data)
        await self._exchange.send(sender_of(message), answer)

    async def keep_near(self) -> None:
        """Stay connected to the deputy, so that it can ask, and be obeyed."""
        while True:
            changed = self._changed.next
            wanted = [each for each in (self._addresses, self._leader_addresses) if each]
            for addresses in wanted:
                await self._reach(addresses)
            with trio.move_on_after(_PAUSE if wanted else 60.0):
                await changed.wait()

    async def _reach(self, addresses: tuple[str, ...]) -> None:
        host, peer_id = self._exchange.host, parse_peer_address(addresses[0])[1]
        try:
            with trio.move_on_after(_DIAL_TIMEOUT):
                if not host.is_connected(peer_id):
                    await host.connect_any(addresses)
                await self._exchange.open(peer_id)
        except NeuroGridError as exc:
            logger.debug("%s cannot be reached: %s", peer_id, exc)


def refuse_other_run() -> RequestRefusedError:
    """Error that refuses a request about a run in which this machine takes no part."""
    return RequestRefusedError(
        "this machine is no member of that run", code=ErrorCode.NOT_SUPPORTED, is_expected=True
    )
