"""Messages that came, and where they go: an answer to its waiter, a request to its handlers.

Knows no streams: how to refuse, and what to do when a message is done with, it is told with each message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from neurogrid.errors import (
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    TooLargeForPeerError,
    TransportError,
)
from neurogrid.p2p.exchange.pending import PendingRequests
from neurogrid.p2p.exchange.served_requests import Serving
from neurogrid.p2p.exchange.subscribers import Job, Subscribers
from neurogrid.p2p.peer_log import PeerLog
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.message_forms import (
    BadAnswerError,
    name_of,
    opened,
    refusal,
    refused_error,
    sender_of,
)
from neurogrid.p2p.streams.tracing import answer_received
from neurogrid.p2p.wire import ErrorCode, TensorMessage

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

# Errors that answer a request which was given up, as with a session that was left or that goes another way: no task
# waits for them, and they are no news.
_LATE = frozenset({ErrorCode.SESSION_UNKNOWN, ErrorCode.PEER_UNREACHABLE})


class Dispatcher:
    """Waiters, handlers, and what runs of them.

    Attributes:
        pending: requests of ours that wait for an answer.
        subscribers: the handlers of each type of message.
        serving: the requests that are being served.
        authorise: called with each message that handlers are to get; raises RequestRefusedError for what its sender
            may not send.
    """

    def __init__(self, spawn: Callable[..., None], bounds: Bounds) -> None:
        self.pending = PendingRequests(bounds, spawn=spawn)
        self.subscribers = Subscribers()
        self.serving = Serving(spawn, bounds)
        self.authorise: Callable[[TensorMessage], None] = lambda message: None
        self._max_waiting = bounds.max_waiting_per_peer
        self._log = PeerLog(logger)

    def serve(
        self,
        message: TensorMessage,
        *,
        refuse: Callable[[TensorMessage], None],
        on_violation: Callable[[RemoteProtocolError], None],
        on_done: Callable[[], None],
    ) -> None:
        """Deal with a message now, or in a task when its turn has come.

        `refuse(error message)` answers the peer and does not wait; `on_violation` gets what a handler finds
        wrong with the peer; `on_done` is called once, when nothing of the message is needed any more.

        Raises:
            RemoteProtocolError: its Data is malformed.
        """
        is_submitted = False
        try:
            job = self.take(message, form=opened)
            if job is not None:
                is_submitted = self._submit(job, message, refuse, on_violation, on_done)
        except BadAnswerError as exc:
            self.pending.fail(sender_of(message), exc.error, correlation=message.request_id)
        except RequestRefusedError as exc:
            self._log_refusal(message, exc)
            refuse(refusal(message, exc))
        except RemoteProtocolError:
            raise
        except (TransportError, PeerRefusedError) as exc:
            _leave_unanswered(message, exc, refuse)
        except Exception:  # the handler is its user's: what it raises is not the connection's
            logger.exception("the handler of %s failed", name_of(message))
            refuse(_failure(message, "internal error"))
        finally:
            if not is_submitted:
                on_done()

    def take(
        self,
        message: TensorMessage,
        *,
        form: Callable[[TensorMessage], TensorMessage] = lambda message: message,
        subscribers: Subscribers | None = None,
    ) -> Job | None:
        """Deal with what needs no waiting; returns what is left to await.

        Args:
            form: takes the envelope off, of what its sender may send.
            subscribers: other handlers than those of `subscribers`.

        Raises:
            RequestRefusedError: its sender may not send it, nobody serves it, or a sync handler refused it.
            RemoteProtocolError: its Data is malformed.
            BadAnswerError: it is a malformed answer.
        """
        subscribers = subscribers or self.subscribers
        if message.msg_type is not None and message.msg_type.traits.answers is not None:
            message = form(message)
            if self.pending.resolve(message):
                answer_received(message)
                return None
            if not subscribers.has(message):
                if not self.pending.keep(message):
                    logger.debug("nobody waits for %s of %s", name_of(message), message.from_peer)
                return None
            self.authorise(message)
            return subscribers.call(message)
        self.authorise(message)
        return subscribers.call(form(message))

    def take_error(self, message: TensorMessage) -> bool:
        """Fail the requests that a received Error speaks of; False when there were none.

        Raises:
            RemoteProtocolError: its Data is malformed.
        """
        error = refused_error(message)
        correlation = message.request_id or None
        if self.pending.fail(sender_of(message), error, correlation=correlation):
            return True
        is_late = correlation is not None and error.code in _LATE
        level = logging.DEBUG if is_late else logging.WARNING
        self._log.log(level, sender_of(message), "%s reports: %s", message.from_peer, error.text)
        return False

    def forget(self, peer_id: str, error: NeuroGridError) -> None:
        """A peer is lost: what waits for it fails, what it has waiting is dropped."""
        self.pending.fail(peer_id, error)
        self.pending.forget(peer_id)
        self.serving.forget(peer_id)
        self._log.forget(peer_id)

    def _submit(
        self,
        job: Job,
        message: TensorMessage,
        refuse: Callable[[TensorMessage], None],
        on_violation: Callable[[RemoteProtocolError], None],
        on_done: Callable[[], None],
    ) -> bool:
        async def run() -> None:
            try:
                await job.run()
            except RequestRefusedError as exc:
                self._log_refusal(message, exc)
                refuse(refusal(message, exc))
            except TooLargeForPeerError as exc:
                error = RequestRefusedError(
                    f"the answer is too large: {exc}", code=ErrorCode.LIMIT_EXCEEDED
                )
                self._log_refusal(message, error)
                refuse(refusal(message, error))
            except RemoteProtocolError as exc:
                on_violation(exc)
            except (TransportError, PeerRefusedError) as exc:
                _leave_unanswered(message, exc, refuse)
            except (
                Exception
            ):  # a fault of this handler: its request fails, and no other of the stream
                logger.exception("the handler of %s failed", name_of(message))
                refuse(_failure(message, "internal error"))

        def done() -> None:
            job.drop()
            on_done()

        if self.serving.submit(sender_of(message), run, done):
            return True
        job.drop()
        raise RequestRefusedError(
            f"{self._max_waiting} requests wait already",
            code=ErrorCode.LIMIT_EXCEEDED,
            retry_after=1.0,
        )

    def _log_refusal(self, message: TensorMessage, error: RequestRefusedError) -> None:
        level = logging.DEBUG if error.is_expected else logging.WARNING
        sender = sender_of(message)
        self._log.log(level, sender, "refused %s of %s: %s", name_of(message), sender, error)


def _leave_unanswered(
    message: TensorMessage, error: NeuroGridError, refuse: Callable[[TensorMessage], None]
) -> None:
    """The peer went away, or would not have our answer; or it is there, and still waits for what our handler could not
    get from another."""
    logger.debug("%s of %s: not answered: %s", name_of(message), message.from_peer, error)
    if message.request_id:
        refuse(_failure(message, "another peer did not do its part"))


def _failure(message: TensorMessage, reason: str) -> TensorMessage:
    """Make the refusal that tells a peer enough of what went wrong here; the log has the rest."""
    return refusal(message, RequestRefusedError(reason, code=ErrorCode.COMPUTE_FAILED))
