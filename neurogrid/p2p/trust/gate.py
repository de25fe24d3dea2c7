"""The gate in front of a host's streams: a peer that is not admitted is served `OPEN_PROTOCOLS` and nothing else.

Strategy: the dialler of a connection opens a stream of `/neurogrid/trust/1` on it, shows its credentials; the other
side judges, shows its own, and is judged. Either refuses by closing the connection, after it said why. A peer that
has shown nothing after `ADMISSION_TIMEOUT` is disconnected. What an admission rests on ends with the last connection
to the peer. Every half minute, more often where the cluster's key is, and when something changed, admitted
peers are judged again; own certificates that were renewed, and revocations that were learned, are shown by a new
exchange on the open connection.

A stream that comes while its peer's exchange is under way waits for the end of it, so that neither side need know
when exactly the other has made up its mind.

A host that takes part in a DHT serves it to strangers too: their connections are kept, as many as there is room for,
and nothing else is served on them.

Which peers are admitted, `Admission` says; how streams are made is `Host`'s matter.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from neurogrid.errors import (
    NeuroGridError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.trust.admission import Admission, Admitted
from neurogrid.p2p.trust.gated_peer import GatedPeer
from neurogrid.p2p.trust.limits import (
    ADMISSION_TIMEOUT,
    MAX_EXCHANGES_PER_PEER,
    MAX_HELD_STREAMS,
    MAX_STRANGERS,
    MAX_UNADMITTED,
)
from neurogrid.p2p.trust.messages import (
    TRUST_PROTOCOL,
    Credentials,
    Verdict,
    read_frame,
    say_no,
    write_frames,
)
from neurogrid.p2p.trust.private_files import LOCK_AGAIN, LOCK_TIMEOUT, DirectoryLockedError
from neurogrid.p2p.trust.refusal import SILENCE, NotAdmittedError, Refusal, RefusedError
from neurogrid.p2p.trust.refusal_log import RefusalLog

__all__ = ["Gate", "GatedHost", "OPEN_PROTOCOLS"]

logger = logging.getLogger(__name__)

OPEN_PROTOCOLS: Final = frozenset({"/ipfs/id/1.0.0", "/ipfs/ping/1.0.0", TRUST_PROTOCOL})
"""The protocols that a peer is served before it is admitted."""

# A connection may be replaced by another while the exchange begins: then it is begun again.
MAX_ATTEMPTS: Final = 3
RETRY_DELAY: Final = 0.2  # seconds
# Reasons why peers were refused, for the tasks that wait for them.
MAX_REMEMBERED: Final = 256


class GatedHost(Protocol):
    """The host, as far as the gate needs it."""

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None: ...

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream: ...

    async def disconnect(self, peer_id: str) -> None: ...


class Gate:
    """The admissions of one host.

    Args:
        host: the host; `on_admitted(peer_id)` of it is called for each connection once its peer is admitted.
        admission: the policy.
    """

    def __init__(
        self, host: GatedHost, admission: Admission, on_admitted: Callable[[str], None]
    ) -> None:
        self._host = host
        self._admission = admission
        self._on_admitted = on_admitted
        self._peers: dict[str, GatedPeer] = {}
        self._tolerated: dict[str, frozenset[str]] = {}
        self._for_strangers: frozenset[str] = frozenset()
        # Peers that stay although they were refused.
        self._strangers: OrderedDict[str, None] = OrderedDict()
        self._refusals: OrderedDict[str, NotAdmittedError] = OrderedDict()
        self._log = RefusalLog(logger)
        self._changed = trio.Event()
        admission.on_change(self.wake)

    # For the host

    def role_of(self, peer_id: str) -> str | None:
        """The role of a connected peer that is admitted; None for any other."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.admitted is None or not peer.is_admitted:
            return None
        return peer.admitted.role

    def is_admitted(self, peer_id: str) -> bool:
        """Whether a peer is connected and admitted."""
        return self.role_of(peer_id) is not None

    def tolerate(self, peer_id: str, protocol_ids: Iterable[str]) -> None:
        """Keep connections to a peer that is not admitted, and serve it these protocols besides."""
        self._tolerated[peer_id] = frozenset(protocol_ids)

    def serve_strangers(self, protocol_ids: Iterable[str]) -> None:
        """Serve these protocols, and ask for them, where nobody is admitted; keep connections for their sake."""
        self._for_strangers |= frozenset(protocol_ids)

    def refuse_strangers(self, protocol_ids: Iterable[str]) -> None:
        """Take back what `serve_strangers` granted; a peer for which nothing is left is disconnected."""
        self._for_strangers -= frozenset(protocol_ids)
        if not self._for_strangers:
            for peer_id in self._strangers:
                self._host.start_soon(self._disconnect, peer_id, self._peers.get(peer_id))
            self._strangers.clear()

    def may_ask(self, peer_id: str, protocol_ids: Sequence[str]) -> bool:
        """Whether this host may open a stream to a peer."""
        allowed = OPEN_PROTOCOLS | self._for_strangers | self._tolerated.get(peer_id, frozenset())
        return self.is_admitted(peer_id) or allowed.issuperset(protocol_ids)

    def connected(self, peer_id: str, *, is_dialler: bool) -> None:
        """Note a new connection, and start what is left to do to admit its peer or refuse it."""
        self._refusals.pop(peer_id, None)
        peer = self._peers.setdefault(peer_id, GatedPeer())
        is_first = not peer.is_connected
        peer.is_connected = peer.is_news = True
        if peer.settled.is_set() and not peer.is_admitted:
            # Refused, and back before the connection that was refused is gone.
            peer.settled, peer.error = trio.Event(), None
        if is_dialler:
            peer.num_exchanges += 1
            self._host.start_soon(self._introduce, peer_id, peer)
        elif peer.is_admitted:
            if is_first:  # its exchange was through before the host said anything
                self._settle(peer_id, peer)
        else:
            peer.is_inbound = True
            peer.admitted = self._admission.unseen(peer_id)
            if peer.admitted is not None:
                self._settle(peer_id, peer)
            elif peer_id not in self._tolerated:
                self._evict()
                self._host.start_soon(self._expect, peer_id, peer)

    def disconnected(self, peer_id: str) -> bool:
        """The last connection to a peer is gone; whether those above had been told of it."""
        peer = self._peers.pop(peer_id, None)
        self._strangers.pop(peer_id, None)
        if peer is None:
            return False
        if not peer.is_admitted and peer.error is None:
            peer.error = _lost(peer_id)
        peer.admitted = None
        peer.settled.set()
        return peer.was_announced

    async def wait_admitted(self, peer_id: str) -> None:
        """Wait until a peer that was dialled is admitted, and admits us.

        Raises:
            NotAdmittedError: one of the two refuses.
            PeerUnreachableError: the connection ended before.
        """
        if peer_id in self._peers:
            # Held: of one whose stream came before the host said anything, another would be made in its place.
            with self._known(peer_id) as peer:
                settled = None
                while settled is not peer.settled:
                    # One that was refused may be back before this task runs: then the matter is open again.
                    settled = peer.settled
                    await settled.wait()
                if peer.error is None or peer_id in self._tolerated:
                    return
                raise peer.error
        if peer_id in self._refusals:
            raise self._refusals[peer_id]
        raise _lost(peer_id)

    async def lets_in(self, peer_id: str, protocol_id: str) -> bool:
        """Whether a stream that a peer opened may be served; waits while the peer's exchange is under way."""
        if protocol_id in OPEN_PROTOCOLS or protocol_id in self._for_strangers:
            return True
        if protocol_id in self._tolerated.get(peer_id, ()):
            return True
        with self._known(peer_id) as peer:
            is_undecided = not peer.is_connected or peer.num_exchanges
            if not peer.settled.is_set() and is_undecided and peer.num_held < MAX_HELD_STREAMS:
                peer.num_held += 1
                try:
                    with trio.move_on_after(ADMISSION_TIMEOUT):
                        await peer.settled.wait()
                finally:
                    peer.num_held -= 1
            return peer.is_admitted

    def wake(self) -> None:
        """Look at all again, now: the clock was set, or something changed."""
        self._changed.set()

    async def run(self) -> None:
        """Judge again and show again, until the host ends."""
        while True:
            self._changed = trio.Event()
            asks_renewal = self._admission.refresh()
            for peer_id, peer in tuple(self._peers.items()):
                if peer.admitted is None or not peer.is_admitted:
                    continue
                try:
                    self._admission.recheck(peer.admitted)
                except RefusedError as exc:
                    self._refuse(peer_id, peer, exc)
                    self._host.start_soon(self._disconnect, peer_id, peer)
                    continue
                asks_here = asks_renewal and peer.admitted.is_issuer
                is_outdated = peer.shown is not None and peer.shown != self._admission.edition
                if asks_here or is_outdated:
                    asks_renewal = asks_renewal and not asks_here  # one certificate is enough
                    self._host.start_soon(self._show_again, peer_id, peer)
            with trio.move_on_after(self._admission.recheck_interval):
                await self._changed.wait()

    async def serve(self, stream: Stream) -> None:
        """Serve a stream of `/neurogrid/trust/1`: the other side of `_exchange`."""
        with self._known(stream.peer_id) as peer:
            if peer.num_served >= MAX_EXCHANGES_PER_PEER:
                await stream.reset()
                return
            peer.num_served += 1
            peer.num_exchanges += 1
            try:
                with trio.fail_after(ADMISSION_TIMEOUT):
                    await self._answer(stream, peer)
            except (trio.TooSlowError, TransportError) as exc:
                logger.debug("the exchange with %s came to nothing: %s", stream.peer_id, exc)
                await stream.reset()
            finally:
                peer.num_served -= 1
                self._end_exchange(peer)

    # Exchanges

    async def _introduce(self, peer_id: str, peer: GatedPeer) -> None:
        """Show our credentials on a connection that this host dialled, and settle the matter."""
        try:
            await self._begin(peer_id, peer, self._admission.unseen(peer_id))
        finally:
            self._end_exchange(peer)

    async def _show_again(self, peer_id: str, peer: GatedPeer) -> None:
        """The same on a connection that goes on."""
        if peer.num_exchanges:
            peer.is_waiting = True
            return
        if self._peers.get(peer_id) is not peer:
            return
        peer.num_exchanges += 1
        try:
            await self._begin(peer_id, peer, None)
        finally:
            self._end_exchange(peer)

    def _end_exchange(self, peer: GatedPeer) -> None:
        peer.num_exchanges -= 1
        if peer.is_waiting and not peer.num_exchanges:
            peer.is_waiting = False
            self.wake()

    async def _begin(self, peer_id: str, peer: GatedPeer, unseen: Admitted | None) -> None:
        error: NeuroGridError
        try:
            with trio.fail_after(ADMISSION_TIMEOUT):
                if await self._try_exchange(peer_id, peer, may_fail=unseen is not None):
                    return
            # It does not know the protocol, and need not.
            peer.admitted = unseen
            self._settle(peer_id, peer)
            return
        except trio.TooSlowError:
            error = RefusedError(
                Refusal.TIMED_OUT,
                f"the exchange of credentials took longer than {ADMISSION_TIMEOUT:g} s",
            )
        except NeuroGridError as exc:
            error = exc
        if self._peers.get(peer_id) is not peer:
            return  # the connection is gone, and its waiters know
        if peer.is_admitted and _is_silence(error):
            logger.debug("the exchange with %s came to nothing: %s", peer_id, error)
            return
        if peer.error is None:
            self._note(peer_id, peer, error)
        peer.settled.set()
        await self._disconnect(peer_id, peer)

    async def _try_exchange(self, peer_id: str, peer: GatedPeer, *, may_fail: bool) -> bool:
        """Do one exchange; False if the peer does not know the protocol and `may_fail`.

        Raises:
            NeuroGridError: either side refuses, or the connection does not carry it.
        """
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await trio.sleep(RETRY_DELAY)
            if self._peers.get(peer_id) is not peer:
                raise _lost(peer_id)
            try:
                stream = await self._host.open_stream(peer_id, [TRUST_PROTOCOL])
            except PeerUnreachableError:
                if may_fail:
                    return False
                continue
            try:
                await self._exchange(stream, peer)
                return True
            except TransportError as exc:
                logger.debug("the exchange with %s broke: %s", peer_id, exc)
            finally:
                await stream.aclose()
        raise RefusedError(
            Refusal.NOT_SPOKEN,
            f"it does not answer {TRUST_PROTOCOL}: it is no member of a cluster, or has closed the connection",
        )

    async def _exchange(self, stream: Stream, peer: GatedPeer) -> None:
        """The side that opened the stream."""
        peer_id, edition = stream.peer_id, self._admission.edition
        await write_frames(stream, self._admission.credentials(peer_id, asks=True))
        try:
            issued = await self._read_verdict(stream)
        except NotAdmittedError as exc:
            self._note(peer_id, peer, exc)  # at once: it closes the connection now
            raise
        admitted = await self._judge(stream, peer, issued=issued)
        peer.shown = self._admission.edition if issued else edition
        peer.take(admitted)
        await write_frames(stream, Verdict(issued=admitted.issued))
        self._settle(peer_id, peer)

    async def _answer(self, stream: Stream, peer: GatedPeer) -> None:
        """The other side."""
        peer_id = stream.peer_id
        try:
            admitted = await self._judge(stream, peer)
        except RefusedError:
            peer.settled.set()
            await self._disconnect(peer_id, peer)
            return
        edition = self._admission.edition
        await write_frames(
            stream, Verdict(issued=admitted.issued), self._admission.credentials(peer_id)
        )
        try:
            issued = await self._read_verdict(stream)
            if issued:
                self._admission.take_issued(issued, admitted)
        except (NotAdmittedError, RemoteProtocolError) as exc:
            self._refuse(peer_id, peer, exc)
            await self._disconnect(peer_id, peer)
            return
        peer.shown = self._admission.edition if issued else edition
        peer.take(admitted)
        await stream.aclose()
        self._settle(peer_id, peer)

    async def _judge(self, stream: Stream, peer: GatedPeer, *, issued: bytes = b"") -> Admitted:
        """Read what the peer shows, and decide; a peer that is refused is told why.

        Args:
            issued: a certificate that it has sent for us already, or nothing: looked at once it is admitted.

        Raises:
            RefusedError: it is not admitted, for what it showed, or for what it issued.
        """
        try:
            shown = Credentials.decode(await read_frame(stream))
            admitted = await self._admit(stream.peer_id, shown)
            if issued:
                self._admission.take_issued(issued, admitted)
            return admitted
        except RemoteProtocolError as exc:
            refused = _as_refused(exc)
            self._note(stream.peer_id, peer, refused)
            await say_no(stream, refused)
            raise refused from exc

    async def _admit(self, peer_id: str, shown: Credentials) -> Admitted:
        """Have the policy judge. A process that has its directory locked is waited for here, where others go on.

        Raises:
            RefusedError: it does not admit the peer, or has not said in time.
        """
        until = trio.current_time() + LOCK_TIMEOUT
        while True:
            try:
                return self._admission.judge(peer_id, shown)
            except DirectoryLockedError as exc:
                if trio.current_time() >= until:
                    logger.error("cannot give %s a certificate: %s", peer_id, exc)
                    text = "the issuer's directory is locked; its log says by which process"
                    raise RefusedError(Refusal.NO_ISSUER, text) from exc
            await trio.sleep(LOCK_AGAIN)

    async def _read_verdict(self, stream: Stream) -> bytes:
        """Read what the peer says of us; the certificate that it has issued for us, or nothing.

        Raises:
            NotAdmittedError: it does not admit us.
            RemoteProtocolError: it says nothing that makes sense.
        """
        verdict = Verdict.decode(await read_frame(stream))
        if verdict.reason:
            text = verdict.text + self._admission.remark(verdict.reason, is_ours=False)
            raise NotAdmittedError(stream.peer_id, verdict.reason, text, refused_by_peer=True)
        return verdict.issued

    # What comes of them

    def _settle(self, peer_id: str, peer: GatedPeer) -> None:
        peer.error = None
        peer.settled.set()
        self._strangers.pop(peer_id, None)
        if peer.is_news and self._peers.get(peer_id) is peer:
            peer.is_news, peer.was_announced = False, True
            self._on_admitted(peer_id)

    def _refuse(self, peer_id: str, peer: GatedPeer, error: NeuroGridError) -> None:
        """Let everybody know, before the connection is closed."""
        self._note(peer_id, peer, error)
        peer.settled.set()

    def _note(self, peer_id: str, peer: GatedPeer, error: NeuroGridError) -> None:
        """Keep and log why a peer is not admitted."""
        peer.admitted = None
        if isinstance(error, NotAdmittedError):
            logger.info("%s", error)
        elif isinstance(error, RemoteProtocolError):
            refused = _as_refused(error)
            text = str(refused) + self._admission.remark(refused.reason, is_ours=True)
            if peer_id not in self._tolerated:
                self._log_refusal(peer_id, refused.reason, text)
            error = NotAdmittedError(peer_id, refused.reason, text, refused_by_peer=False)
        peer.error = error
        if isinstance(error, NotAdmittedError):
            self._refusals[peer_id] = error
            if len(self._refusals) > MAX_REMEMBERED:
                self._refusals.popitem(last=False)

    def _log_refusal(self, peer_id: str, reason: Refusal, text: str) -> None:
        """Log a refusal; where strangers are served, as no warning, and not at all if they showed nothing."""
        if not self._for_strangers:
            self._log.refused(peer_id, reason, text)
        elif reason not in SILENCE:
            self._log.refused(peer_id, reason, text, level=logging.INFO)

    async def _expect(self, peer_id: str, peer: GatedPeer) -> None:
        """Disconnect a peer that dialled and then shows nothing."""
        # Of this connection: another has another, and somebody that waits for it.
        settled = peer.settled
        with trio.move_on_after(ADMISSION_TIMEOUT):
            await settled.wait()
        if not settled.is_set() and self._peers.get(peer_id) is peer:
            text = f"it showed no credentials within {ADMISSION_TIMEOUT:g} s"
            self._refuse(peer_id, peer, RefusedError(Refusal.TIMED_OUT, text))
            await self._disconnect(peer_id, peer)

    def _evict(self) -> None:
        """Disconnect the oldest of those that show nothing, if they are too many."""
        waiting = [
            (peer_id, peer)
            for peer_id, peer in self._peers.items()
            if peer.is_inbound and not peer.settled.is_set() and peer_id not in self._tolerated
        ]
        if len(waiting) > MAX_UNADMITTED:
            peer_id, peer = waiting[0]
            text = f"more than {MAX_UNADMITTED} peers have shown no credentials yet"
            self._refuse(peer_id, peer, RefusedError(Refusal.TOO_MANY, text))
            self._host.start_soon(self._disconnect, peer_id, peer)

    async def _disconnect(self, peer_id: str, peer: GatedPeer | None) -> None:
        """Close the connections to a peer, unless there is something that it may have all the same, or it has
        left and come back meanwhile."""
        if peer_id in self._tolerated or self._peers.get(peer_id) is not peer:
            return
        # A peer that was admitted before has streams open.
        if self._for_strangers and peer is not None and not peer.was_announced:
            self._strangers[peer_id] = None
            if len(self._strangers) <= MAX_STRANGERS:
                return
            peer_id, _ = self._strangers.popitem(last=False)
        try:
            await self._host.disconnect(peer_id)
        except TransportError as exc:
            logger.debug("%s", exc)

    @contextmanager
    def _known(self, peer_id: str) -> Iterator[GatedPeer]:
        """The peer, also if its stream came before the host said that it is connected."""
        peer = self._peers.setdefault(peer_id, GatedPeer())
        peer.num_users += 1
        try:
            yield peer
        finally:
            peer.num_users -= 1
            is_stray = not (peer.is_connected or peer.num_users or peer.is_admitted)
            if is_stray and self._peers.get(peer_id) is peer:
                del self._peers[peer_id]


def _is_silence(error: NeuroGridError) -> bool:
    """Whether a peer has said nothing, rather than something that is refused: no reason to give up one that is
    admitted."""
    if isinstance(error, RefusedError):
        return error.reason in SILENCE
    return isinstance(error, TransportError)


def _as_refused(exc: RemoteProtocolError) -> RefusedError:
    if isinstance(exc, RefusedError):
        return exc
    return RefusedError(Refusal.MALFORMED, f"what it showed makes no sense: {exc}")


def _lost(peer_id: str) -> PeerUnreachableError:
    return PeerUnreachableError(f"the connection to {peer_id} ended before either was admitted")
