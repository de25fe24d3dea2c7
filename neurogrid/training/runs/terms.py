"""Terms: who leads a run when its leader may be dead. Pure machines: no clock, no socket, no file.

    Sitting     who sits on seats, who leads and who is deputy, by the lines of a journal
    Voter       a member: whom it obeys, and what it promised to whom
    Candidate   a deputy: what it has copied of the journal, and the promises that it has
    Copies      a leader: what its deputy has copied, and whether orders may go out

A leader gives no order that follows from a line which its deputy has not copied, until half of the members have said
that they have no such deputy any more. A deputy leads with the promises of more than half of the members that its copy
names, and copies nothing after it has asked. One member does not do both: so of the two at most one goes on, and it has
all that anybody was told to do.

A member keeps what it promised for as long as it is this incarnation of a member. One that begins anew is somebody
else: it counts from the line that says it joined, which the deputy has to have before anybody is given work by it.

Source: protocol_spec/training/terms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from neurogrid.training.runs.entries import (
    DeputyEntry,
    EndEntry,
    Entry,
    JoinedEntry,
    LedEntry,
    LeftEntry,
    ResumedEntry,
    RunEntry,
)
from neurogrid.training.runs.state import Occupant

__all__ = [
    "Candidate",
    "Copies",
    "Place",
    "Promise",
    "Sitting",
    "Standing",
    "Voter",
    "are_half",
    "are_most",
    "promise_bytes",
]

_DOMAIN: Final = b"neurogrid run promise 1\0"
NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a copy of a journal.

    Attributes:
        line: its last line, from 1; 0 for none.
        digest: SHA-256 of that line without its line feed, 32 bytes; zeros for none.
    """

    line: int = 0
    digest: bytes = bytes(32)


@dataclass(frozen=True, slots=True)
class Promise:
    """A member's promise to obey nobody but this leader from this term on, until it promises a greater one.

    Attributes:
        member: who promises.
        signature: of its identity over `promise_bytes`; empty where nothing is signed.
    """

    member: Occupant
    signature: bytes = b""


def promise_bytes(run: bytes, term: int, leader: str, incarnation: int, place: Place) -> bytes:
    """Bytes that a member signs as its promise: of run, term, leader, incarnation, and the place from which it leads.

    Args:
        run: its id, 16 bytes.
        leader: peer id.
        place: the end of the leader's copy of the journal, behind which it is going to write.
    """
    numbers = b"".join(number.to_bytes(8, "big") for number in (term, incarnation, place.line))
    return _DOMAIN + run + numbers + place.digest + leader.encode()


def are_most(members: Collection[Occupant], those: Collection[Occupant]) -> bool:
    """Whether those are more than half of the members; of none nobody is."""
    return 2 * len(set(members) & set(those)) > len(set(members))


def are_half(members: Collection[Occupant], those: Collection[Occupant]) -> bool:
    """Whether those are so many that the others are not more than half of the members."""
    return 2 * len(set(members) & set(those)) >= len(set(members))


@dataclass(slots=True)
class Sitting:
    """Members on seats, the leader and its deputy, by the lines of a journal.

    Attributes:
        leader, term: of the last line; empty before the first.
        deputy, number: who may ask to lead, and the number of the entry that says so; empty and 0 for nobody.
        seats: members by their seats.
        has_ended: the run is over.
    """

    leader: str = ""
    term: int = 0
    deputy: str = NOBODY
    number: int = 0
    seats: dict[int, Occupant] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def members(self) -> frozenset[Occupant]:
        """Members that sit on seats."""
        return frozenset(self.seats.values())

    def take(self, entry: Entry) -> None:
        """Go on by one entry."""
        if isinstance(entry, JoinedEntry):
            self.seats[entry.seat] = Occupant(entry.peer, entry.incarnation)
        elif isinstance(entry, LeftEntry):
            self.seats.pop(entry.seat, None)
        elif isinstance(entry, ResumedEntry):
            self.seats.clear()
            self.has_ended = False
        elif isinstance(entry, DeputyEntry):
            self.deputy, self.number = entry.peer, entry.number
        elif isinstance(entry, LedEntry):
            self.leader, self.term = entry.leader, entry.term
            self.deputy, self.number = NOBODY, 0
        elif isinstance(entry, RunEntry):
            self.leader = entry.leader
        elif isinstance(entry, EndEntry):
            self.has_ended = True


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of a member, which is its answer to all that it is asked.

    Attributes:
        term, leader: whom it obeys, and since which term.
        number, deputy: the newest that it was told of who the deputy is; empty for nobody.
        place: of the promise, where it has promised its term.
    """

    term: int
    leader: str
    number: int
    deputy: str
    place: Place | None = None


class Voter:
    """A member, in one incarnation.

    Args:
        leader: the peer id of who started it.
    """

    def __init__(self, leader: str) -> None:
        self.standing = Standing(0, leader, 0, NOBODY)

    def obeys(self, sender: str, term: int) -> bool:
        """Whether to do what somebody orders in a term. The first order of a member says which term it is in.

        Its deputy it obeys in a greater term without having promised it: that one leads by what others promised.
        """
        now = self.standing
        if sender == now.deputy and term > now.term:
            self.standing = Standing(term, sender, 0, NOBODY)
            return True
        if sender != now.leader or term < now.term:
            return False
        if term > now.term:
            self.standing = Standing(term, sender, now.number, now.deputy)
        return True

    def appointed(self, sender: str, term: int, number: int, deputy: str) -> Standing:
        """A leader says who its deputy is. It is so if the answer has this number and this term.

        Args:
            number: rises with each deputy of a leader.
            deputy: peer id; empty for nobody.
        """
        if self.obeys(sender, term) and number > self.standing.number:
            now = self.standing
            self.standing = Standing(now.term, now.leader, number, deputy, now.place)
        return self.standing

    def claimed(self, sender: str, term: int, place: Place) -> Standing:
        """A deputy asks for a term. It is promised if the answer has this term, its peer id and this place.

        Whom it has promised a term, and nobody since, it promises a greater one: that one gave up the term before.
        """
        now = self.standing
        is_promised = sender == now.leader and now.place is not None
        if (sender == now.deputy or is_promised) and term > now.term:
            self.standing = Standing(term, sender, 0, NOBODY, place)
        return self.standing


class Candidate:
    """A deputy, in one process.

    Args:
        me: its peer id.

    Attributes:
        place: the end of its copy, whose lines are all on its disk.
        term: the greatest that its copy, or anybody, has told of.
        asked: the term that it asks for; None while it copies.
        promises: that it has for that term, by member.
        refused: members that have another deputy, or none, also in an incarnation after that of its copy.
        laid_aside: the greatest term of copies that it has laid aside for the journal of a later leader; None for none.
            It outlives this process: a leader of such a term may count on what the copy had.
    """

    def __init__(self, me: str, laid_aside: int | None = None) -> None:
        self.me = me
        self.laid_aside = laid_aside
        self.place = Place()
        self.term = 0
        self.members: frozenset[Occupant] = frozenset()
        self.deputy = NOBODY
        self.number = 0
        # Its copy ends in a term of which it has laid one aside, or lacks lines of before it was begun.
        self._is_history = False
        self.asked: int | None = None
        self.promises: dict[Occupant, Promise] = {}
        self.refused: set[Occupant] = set()

    def copied(
        self,
        place: Place,
        *,
        term: int,
        members: frozenset[Occupant],
        deputy: str,
        number: int = 0,
        is_whole: bool = True,
    ) -> bool:
        """Its copy has grown; False where it must not: it asks already, and what it has copied is settled by that.

        Args:
            term: of the leader that wrote the last line.
            members: that sit on seats by the lines up to there.
            deputy, number: whom they name, and by which number; empty for nobody.
            is_whole: it has had all lines that there were when it was begun. A leader that has gone on without this
                deputy takes it again with an empty copy: what names it in lines of before, is no more.
        """
        if self.asked is not None:
            return False
        self.place, self.members = place, members
        self.deputy, self.number = deputy, number
        self.term = max(self.term, term)
        self._is_history = not is_whole or not self.follows(term)
        return True

    def follows(self, term: int) -> bool:
        """Whether it may copy the journal of a leader in this term."""
        return self.laid_aside is None or term > self.laid_aside

    def lay_aside(self, term: int) -> None:
        """Its copy, whose last leader was in this term, is none any more: it begins with an empty one."""
        assert self.asked is None
        self.laid_aside = max(term, self.laid_aside or 0)
        self.place, self.members = Place(), frozenset()
        self.deputy, self.number = NOBODY, 0

    @property
    def may_ask(self) -> bool:
        """Whether its copy names it, and members that it can ask.

        What names it in a term of which it has laid a copy aside is history, as is what does before its copy is whole:
        it copies that once more.
        """
        return self.deputy == self.me and bool(self.members) and not self._is_history

    def ask(self) -> int | None:
        """Begin to ask for a term, or go on; the term. None where it may not."""
        if not self.may_ask:
            return None
        if self.asked is None or self.asked <= self.term:
            self.asked = self.term + 1
            self.promises, self.refused = {}, set()
        return self.asked

    def give_up(self) -> None:
        """Copy again: promises that were given are good for nothing any more."""
        if self.asked is not None:
            self.term = max(self.term, self.asked)
        self.asked, self.promises, self.refused = None, {}, set()

    def answered(self, member: Occupant, standing: Standing, signature: bytes = b"") -> None:
        """A member has answered."""
        if self.asked is None:
            return
        told = (standing.term, standing.leader, standing.place)
        if told == (self.asked, self.me, self.place):
            self.promises[member] = Promise(member, signature)
        elif standing.term >= self.asked:
            self.term = max(self.term, standing.term)
        elif standing.deputy != self.me and standing.number > self.number:
            # Whoever sat on that peer's seat before it was started again has no other deputy, either.
            self.refused |= {each for each in self.members if each.peer == member.peer}

    @property
    def leads(self) -> bool:
        """Whether it has the promises of most of the members."""
        return self.asked is not None and are_most(self.members, self.promises.keys())

    @property
    def is_dropped(self) -> bool:
        """Whether so many members have another deputy, or none, that it can never lead."""
        return self.asked is not None and are_half(self.members, self.refused)

    def may_follow(self, is_patient: bool) -> bool:
        """Whether it looks for a leader that takes it, for which it gives up what it asks for.

        It does while it copies; and while it asks and does not lead, once it has asked for long: members may have gone
        for good, or begun anew, and the leader be back, which goes on with nothing that is not copied.

        Args:
            is_patient: it has asked for long.
        """
        return self.asked is None or (is_patient and not self.leads)


@dataclass
class Copies:
    """A leader's side: whether its deputy has copied what orders follow from.

    Attributes:
        me: the leader's peer id.
        term: its own.
        deputy: who may ask for a term; empty for nobody.
        number: by which members were told so.
        place: the last line of the journal.
        since: the line that names the deputy.
        copied: the line up to which the deputy has it; below `since` before it knows that it is one.
        dropping: the number by which members are told that there is no deputy any more; None where they are not.
        overruled: peers of members that obey somebody else in a greater term, in whatever incarnation, until they obey
            this leader again.
    """

    me: str
    term: int = 0
    deputy: str = NOBODY
    number: int = 0
    line: int = 0
    since: int = 0
    copied: int = 0
    dropping: int | None = None
    overruled: set[str] = field(default_factory=set)
    _members: list[tuple[int, frozenset[Occupant]]] = field(default_factory=list)
    _confirmed: dict[Occupant, int] = field(default_factory=dict)

    @classmethod
    def of(cls, me: str, entries: Iterable[Entry]) -> Copies:
        """Make the copies of a leader that has begun with this journal. Which line its deputy has last is not known:
        any line from the one on that names it may be."""
        copies, sitting = cls(me), Sitting()
        for line, entry in enumerate(entries, 1):
            sitting.take(entry)
            copies.take(line, entry, sitting)
        return copies

    def take(self, line: int, entry: Entry, sitting: Sitting) -> None:
        """A line was written.

        Args:
            sitting: by the lines up to there.
        """
        self.term = sitting.term
        if isinstance(entry, LedEntry | DeputyEntry):
            self.dropped()
        self.wrote(line, sitting.members)
        if isinstance(entry, DeputyEntry):
            self.number = entry.number
            if entry.peer:
                self.appoint(entry.peer, entry.number)

    def wrote(self, line: int, members: frozenset[Occupant]) -> None:
        """A line was written, with these members on seats from there on."""
        self.line = line
        if not self._members or self._members[-1][1] != members:
            self._members.append((line, members))
        if self.deputy == NOBODY:
            self._members = self._members[-1:]

    @property
    def members(self) -> frozenset[Occupant]:
        """Members that sit on seats by the last line."""
        return self._members[-1][1] if self._members else frozenset()

    @property
    def known(self) -> frozenset[Occupant]:
        """Members that sit on seats by any line that the deputy may have as its last."""
        return frozenset().union(*(members for _, members in self._members))

    @property
    def is_open(self) -> bool:
        """Whether orders may go out that follow from the last line."""
        return self.deputy == NOBODY or self.copied >= self.line

    @property
    def is_overruled(self) -> bool:
        """Whether most of the members obey somebody else: this leader leads no more."""
        return are_most(
            self.members, [each for each in self.members if each.peer in self.overruled]
        )

    def appoint(self, deputy: str, number: int) -> None:
        """The journal names a deputy from the last line on: from here on nothing goes out that it has not copied."""
        assert self.deputy == NOBODY
        self.deputy, self.number, self.since, self.copied = deputy, number, self.line, 0
        self._confirmed.clear()

    def has_copied(self, line: int) -> None:
        """The deputy has the journal on its disk up to this line."""
        # An answer of before it was named, perhaps for the second time, says nothing of what it copies now.
        if self.deputy == NOBODY or line < self.since or line <= self.copied:
            return
        self.copied = min(line, self.line)
        while len(self._members) > 1 and self._members[1][0] <= self.copied:
            del self._members[0]

    def has_lost(self, peer: str, line: int) -> bool:
        """Whether the deputy, by what it says that it has, lacks lines that it had: it can be none with such a copy."""
        return peer == self.deputy and line < max(self.since - 1, self.copied)

    def drop(self, number: int) -> None:
        """Begin to do without the deputy: members are told by this number, which is greater than any before."""
        if self.deputy != NOBODY:
            self.dropping = max(number, self.number + 1)

    def keep(self) -> None:
        """The deputy is back before most have confirmed: they are told of it by a greater number again."""
        if self.dropping is not None:
            self.number, self.dropping = self.dropping + 1, None
            self._confirmed.clear()

    @property
    def told(self) -> tuple[int, str] | None:
        """Number and deputy that members are to be told; None before the first, or until the deputy knows."""
        if self.dropping is not None:
            return self.dropping, NOBODY
        if self.deputy != NOBODY and self.copied < self.since:
            return None
        return (self.number, self.deputy) if self.number else None

    def unconfirmed(self, members: Collection[Occupant]) -> list[Occupant]:
        """Members that have not confirmed what they are to be told."""
        if self.told is None:
            return []
        number, _ = self.told
        return [member for member in members if self._confirmed.get(member, 0) < number]

    def answered(self, member: Occupant, standing: Standing) -> None:
        """A member has answered an Appoint."""
        if standing.term > self.term:
            self.overruled.add(member.peer)
        elif (standing.leader, standing.term) == (self.me, self.term):
            self.overruled.discard(member.peer)
            self._confirmed[member] = max(self._confirmed.get(member, 0), standing.number)

    @property
    def is_dropped(self) -> bool:
        """Whether the deputy can lead no more: half of the members of each state that its copy may have say so."""
        if self.dropping is None:
            return False
        without = {member for member, number in self._confirmed.items() if number >= self.dropping}
        return all(are_half(members, without) for _, members in self._members)

    def dropped(self) -> None:
        """The journal says so: orders go out as without a deputy."""
        if self.dropping is not None:
            self.number = self.dropping
        self.deputy, self.dropping = NOBODY, None
        self._members = self._members[-1:]
