"""The sessions that are open on a worker: their owners, which peers may extend them, and when they are over.

Knows no messages; `service` serves those.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.model.adapters import Adapter
from neurogrid.model.caches.cache import MAX_FEW, StageCache
from neurogrid.model.images.places import ImagePlaces
from neurogrid.p2p.exchange.routes import Direction, Place
from neurogrid.p2p.trust.limits import CLOCK_SKEW
from neurogrid.p2p.wire import ErrorCode
from neurogrid.planner import name_range
from neurogrid.worker.held_model import HeldModel

__all__ = ["Session", "SessionTable"]

# Sessions that are over, for messages that were on their way.
# Of each owner, and of so many of them.
MAX_REMEMBERED = 1024
MAX_OWNERS_REMEMBERED = 16

_Key = tuple[str, int]
"""A peer, and the id of a session."""

_numbers = count(1)


@dataclass
class Session:
    """One session's cache over layers [start, stop) of one model.

    Attributes:
        session_id: u64; 0 for a cache of 1.0.0, which has no sessions.
        owner: the coordinator that opened it.
        place: this worker's place in the session's route; None where the coordinator sends and gets everything.
        wire: the element type in which its activations and results travel.
        length: tokens that it has taken.
        last_used: trio's time of the last activation.
        handed_on: the request id of the last activation that went to the successor; 0 for none.
        turn: held by the task that computes for it or changes what it is; notified when `length` has grown.
        passing: held by the task that passes on a result, so that results leave in the order of their tokens.
        is_over: nothing is to be computed for it any more.
        number: its own in this process, whoever opened it, and also where it has no id.
        adapter: beside its layers; None for none.
        adapter_ids: the blobs of its parts, as SessionOpen has them; empty for none.
        takes_cuts: its activations may begin before its end.
        last_position: where the last one began; None before the first.
        images: where its images are, where its layers make something of that; None for nowhere.
    """

    session_id: int
    owner: str
    model: HeldModel
    start: int
    stop: int
    max_length: int
    cache: StageCache
    place: Place | None = None
    wire: str = "F16"
    length: int = 0
    last_used: float = field(default_factory=trio.current_time)
    handed_on: int = 0
    turn: trio.Condition = field(default_factory=trio.Condition)
    passing: trio.Lock = field(default_factory=trio.Lock)
    is_over: bool = False
    number: int = field(default_factory=_numbers.__next__)
    adapter: Adapter | None = None
    adapter_ids: bytes = b""
    takes_cuts: bool = False
    last_position: int | None = None
    images: ImagePlaces | None = None

    def goes_back_to(self, position: int) -> bool:
        """Whether an activation may begin at `position`, which is before its end."""
        last = self.last_position
        return (
            self.takes_cuts
            and last is not None
            and 0 < last < position < self.length <= last + MAX_FEW
        )

    @property
    def source(self) -> str:
        """The one peer whose activations it takes."""
        return (self.place and self.place.source(Direction.FORWARD)) or self.owner

    @property
    def origin(self) -> str:
        """The source of its activations, for errors: layers and peer."""
        if self.place is None or self.place.predecessor is None:
            return f"the coordinator {self.owner}"
        layers = range(*self.place.route.layers_of(self.place.index - 1))
        return f"{name_range(layers)} on worker {self.source}"

    @property
    def successor(self) -> str | None:
        """The worker that gets its results; None where the coordinator does."""
        return self.place.successor if self.place else None


class SessionTable:
    """Sessions by owner and id. Activations that come name the id alone: they are told apart by who sends them."""

    def __init__(self, *, on_drop: Callable[[Session], None]) -> None:
        """`on_drop` is called with each session that is over."""
        self._on_drop = on_drop
        self._sessions: dict[_Key, Session] = {}
        self._by_source: dict[_Key, Session] = {}
        # What is handed on to a peer under an id is one owner's.
        self._handed_on: set[_Key] = set()
        # Of each owner the source by id; the latest last.
        self._over: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()
        # Of those the ones that their owner may not know to be over.
        self._untold: set[_Key] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return self._sessions.get((session.owner, session.session_id)) is session

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def of_owner(self, owner: str) -> list[Session]:
        """The sessions of one owner."""
        return [session for session in self._sessions.values() if session.owner == owner]

    def is_taken(self, session: Session) -> bool:
        """Whether a session of its id is open that is its owner's, or that could not be told from it on the way: of
        the same source, or handed on to the same peer.
        """
        return (
            (session.owner, session.session_id) in self._sessions
            or (session.source, session.session_id) in self._by_source
            or (session.successor or "", session.session_id) in self._handed_on
        )

    def was_closed(self, session_id: int, source: str) -> bool:
        """Whether a session of this id took activations from this worker a while ago, and is no more."""
        return any(known.get(session_id) == source != owner for owner, known in self._over.items())

    def untold_owner(self, session_id: int, source: str) -> str | None:
        """The coordinator of a session for which `was_closed` holds, if it did not end that itself; None if it did."""
        return next(
            (
                owner
                for owner, known in self._over.items()
                if known.get(session_id) == source and (owner, session_id) in self._untold
            ),
            None,
        )

    def was_open(self, session_id: int, owner: str) -> bool:
        """Whether this coordinator had or closed a session of this id a while ago, which is no more."""
        return session_id in self._over.get(owner, ())

    def add(self, session: Session) -> None:
        """Open a session that is not taken."""
        self._sessions[session.owner, session.session_id] = session
        self._by_source[session.source, session.session_id] = session
        if session.successor is not None:
            self._handed_on.add((session.successor, session.session_id))

    def find(self, session_id: int, sender: str) -> Session | None:
        """The session, for a peer that may extend it; None where there is none.

        Raises:
            RequestRefusedError: it takes its activations from somebody else (UNAUTHORIZED).
        """
        session = self._by_source.get((sender, session_id))
        if session is not None:
            return session
        for other in self._sessions.values():
            if other.session_id == session_id:
                raise RequestRefusedError(
                    f"session {session_id} takes no activations from {sender}: its "
                    f"{'route names another predecessor' if other.place else 'coordinator is another'}",
                    code=ErrorCode.UNAUTHORIZED,
                )
        return None

    def of(self, session_id: int, owner: str) -> Session | None:
        """The session of this owner, if there is one."""
        return self._sessions.get((owner, session_id))

    def close(self, session_id: int, owner: str) -> None:
        """Close a session of this owner, if there is one; if its opening comes later, it is over by then."""
        session = self.of(session_id, owner)
        if session is not None:
            self.drop(session, is_asked=True)
        else:
            self._remember(session_id, owner, owner)
            self._untold.discard((owner, session_id))

    def drop(self, session: Session, *, was_opened: bool = True, is_asked: bool = False) -> None:
        """Free a session; one whose opening failed may be opened again.

        Args:
            is_asked: its owner wants no more of it.
        """
        if session in self:
            del self._sessions[session.owner, session.session_id]
            del self._by_source[session.source, session.session_id]
            if session.successor is not None:
                self._handed_on.discard((session.successor, session.session_id))
            session.is_over = True
            self._on_drop(session)
            if was_opened:
                if not is_asked:
                    self._untold.add((session.owner, session.session_id))
                self._remember(session.session_id, session.source, session.owner)

    def _remember(self, session_id: int, source: str, owner: str) -> None:
        known = self._over.setdefault(owner, OrderedDict())
        known.setdefault(session_id, source)
        if len(known) > MAX_REMEMBERED:
            forgotten, _ = known.popitem(last=False)
            self._untold.discard((owner, forgotten))
        self._over.move_to_end(owner)
        if len(self._over) > MAX_OWNERS_REMEMBERED:
            gone, ids = self._over.popitem(last=False)
            self._untold.difference_update((gone, each) for each in ids)

    def forget(self, owner: str) -> None:
        """Drop the sessions of a peer."""
        for session in self.of_owner(owner):
            self.drop(session)

    def expired(self, *, idle: float) -> list[tuple[Session, str]]:
        """The sessions that are over by themselves, each with the reason.

        Args:
            idle: seconds without an activation.
        """
        now, wall = trio.current_time(), time.time()
        found = []
        for session in self:
            if now - session.last_used >= idle:
                found.append((session, f"no activation came for {idle:g} s"))
            elif session.place and wall >= session.place.route.until + CLOCK_SKEW:
                found.append((session, "its route has expired"))
        return found
