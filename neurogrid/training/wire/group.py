"""The payloads that a group agrees by: decisions, proposals, and what leader and members tell each other of them.

Each message tells the whole state of its sender, as far as the other needs it: one that is lost or comes twice does no
harm, since the next says the same again. When each is sent is not known here.

What names many members names them by their places: the leader tells it to each of them, so that the bytes grow with the
square of their number.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import over_limit, violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Form,
    Map,
    array,
    binary,
    line,
    one_of,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import MAX_ADDRESS_CHARS, MAX_ERROR_CHARS, MAX_PEER_ID_CHARS
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.training.wire.forms import number

__all__ = [
    "DIGEST_BYTES",
    "MAX_GROUP_MEMBERS",
    "MAX_NEW_ADDRESSES",
    "MAX_NOTE_BYTES",
    "MAX_STATE_VECTORS",
    "MAX_TOLD_DECISIONS",
    "MAX_WEIGHT",
    "Ballot",
    "Candidate",
    "Decision",
    "DecisionPayload",
    "Join",
    "Joined",
    "Lead",
    "Leave",
    "Member",
    "Plan",
    "Promise",
    "Proposal",
    "StateInfo",
    "Status",
    "peers_at",
    "place_peers",
    "table_of",
]

DIGEST_BYTES: Final = 32
"""Bytes of a digest."""

MAX_GROUP_MEMBERS: Final = 1024
"""Members of a group: what its leader tells grows with their square. More are groups of groups."""

MAX_NEW_ADDRESSES: Final = 256
"""Addresses of newcomers in one decision."""

MAX_STATE_VECTORS: Final = 16
"""Vectors of a state: weights, and what an outer optimiser keeps for each."""

MAX_NOTE_BYTES: Final = 64 * 1024
"""Bytes of what a state has besides vectors: positions, counters."""

MAX_TOLD_DECISIONS: Final = 8
"""Decisions in one message: who is further behind fetches the state."""

MAX_WEIGHT: Final = 1e30
"""The most that a vector counts."""

_MAX_NESTED: Final = 768 * 1024
_MAX_REASON: Final = 256


_WEIGHT: Final = number(0.0, MAX_WEIGHT)
# Not all arrays have a writer for their items: floats go as they are.
_WEIGHTS: Final = array(
    Form(_WEIGHT.must, lambda value: type(value) is float and 0 <= value <= MAX_WEIGHT),
    MAX_GROUP_MEMBERS,
)
_PEER: Final = text(MAX_PEER_ID_CHARS, smallest=1)
_PEERS: Final = array(_PEER, MAX_GROUP_MEMBERS)
# In the table of a decision: members before it, and those that come by it.
_PLACE: Final = uint(2 * MAX_GROUP_MEMBERS - 1)
_PLACES: Final = array(_PLACE, MAX_GROUP_MEMBERS)
# Where the rows of a grid begin and end.
_ROWS: Final = array(uint(MAX_U32), MAX_GROUP_MEMBERS // 2 + 1)
_DIGEST: Final = binary(DIGEST_BYTES)
_NAME: Final = text(32, smallest=1)


class Member(NamedTuple):
    """One process of a group.

    Attributes:
        peer: its peer id (base58).
        incarnation: u64, chosen at random when the process joined: one that was started again is another member.
    """

    peer: str
    incarnation: int


class Ballot(NamedTuple):
    """A number of a proposal: of two, the greater one is the later.

    Attributes:
        term: u64, of the leader, from 1; 0 for none.
        attempt: u64, of the leader in its term, from 1.
    """

    term: int
    attempt: int


def _check_unique(what: str, peers: Sequence[object]) -> None:
    if len({*peers}) != len(peers):
        raise violation(f"{what} names a peer twice")


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of what a group has decided: its members from here on, and the outcome of a round, if it is one.

    Attributes:
        index: u64, from 1, without gaps.
        round: u64, the rounds decided so far, this one included.
        peers, incarnations: the members from here on: those before it that stay, in their order, and then others.
        contributors, weights: whose vectors are in the aggregate, and how they count; empty where it is no round.
        digest: of the aggregate, 32 bytes; empty where it is no round, or yet to be computed.
        num_elements, chunk_elements, codec: of the aggregate, to fetch it by.
        holders: peer ids of those that had the aggregate when it was decided.
        newcomers, addresses: multiaddrs of peers that are members from here on and were none before, each with the
            peer id that it belongs to: so that all know them, also one that leads later.
    """

    index: int
    round: int
    peers: tuple[str, ...]
    incarnations: tuple[int, ...]
    contributors: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    digest: bytes = b""
    num_elements: int = 0
    chunk_elements: int = 0
    codec: str = ""
    holders: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members from here on."""
        return tuple(Member(*pair) for pair in zip(self.peers, self.incarnations, strict=True))

    @property
    def is_round(self) -> bool:
        """Whether it is the outcome of a round."""
        return bool(self.contributors)

    def encode(self, before: Sequence[Member]) -> bytes:
        """The payload that tells it to those that know the members before it.

        Raises:
            LocalProtocolError: it names others, or not in this order.
        """
        members = self.members
        stay, known = {*members}, {*before}
        joined = [member for member in members if member not in known]
        if (*(member for member in before if member in stay), *joined) != members:
            raise LocalProtocolError("members that stay are named in their order, and then others")
        table = table_of(self, before)
        return DecisionPayload(
            index=self.index,
            round=self.round,
            gone=tuple(place for place, member in enumerate(before) if member not in stay),
            joined=tuple(member.peer for member in joined),
            incarnations=tuple(member.incarnation for member in joined),
            contributors=place_peers(self.contributors, table),
            weights=self.weights,
            digest=self.digest,
            num_elements=self.num_elements,
            chunk_elements=self.chunk_elements,
            codec=self.codec,
            holders=place_peers(self.holders, table),
            newcomers=place_peers(self.newcomers, table),
            addresses=self.addresses,
        ).encode()


def table_of(decision: Decision, before: Sequence[Member]) -> tuple[str, ...]:
    """The peers that places are of: the members before a decision, and behind them those that are members by it."""
    known = {*before}
    joined = (member.peer for member in decision.members if member not in known)
    return (*(member.peer for member in before), *joined)


def place_peers(peers: Sequence[str], table: Sequence[str]) -> tuple[int, ...]:
    """Places of peers in a table.

    Raises:
        LocalProtocolError: one is not in it.
    """
    places = {peer: place for place, peer in enumerate(table)}
    try:
        return tuple(places[peer] for peer in peers)
    except KeyError as exc:
        raise LocalProtocolError(f"{exc.args[0]} has no place among the members") from exc


def peers_at(places: Sequence[int], table: Sequence[str]) -> tuple[str, ...]:
    """The peers at places of a table.

    Raises:
        RemoteProtocolError: there is none at one of them.
    """
    if places and max(places) >= len(table):
        raise violation(f"place {max(places)} is none of {len(table)}")
    return tuple(table[place] for place in places)


@dataclass(frozen=True, slots=True)
class DecisionPayload(ControlPayload):
    """A `Decision`, as what it changes of the members before it.

    Its table is the members before it, in their order, and behind them `joined`; numbers of peers are places in it.

    Attributes:
        gone: places of members that are none from here on, ascending.
        joined, incarnations: members from here on that were none, one that was started again among them.
    """

    index: int
    round: int
    gone: tuple[int, ...] = ()
    joined: tuple[str, ...] = ()
    incarnations: tuple[int, ...] = ()
    contributors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    digest: bytes = b""
    num_elements: int = 0
    chunk_elements: int = 0
    codec: str = ""
    holders: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()

    _map = Map(
        "a decision",
        {
            "index": uint(MAX_U64, smallest=1),
            "round": uint(MAX_U64),
            "gone": optional(_PLACES),
            "joined": optional(_PEERS),
            "incarnations": optional(array(uint(MAX_U64), MAX_GROUP_MEMBERS)),
            "contributors": optional(_PLACES),
            "weights": optional(_WEIGHTS),
            "digest": optional(_DIGEST),
            "num_elements": optional(uint(MAX_U64)),
            "chunk_elements": optional(uint(MAX_U32)),
            "codec": optional(_NAME),
            "holders": optional(_PLACES),
            "newcomers": optional(array(_PLACE, MAX_NEW_ADDRESSES)),
            "addresses": optional(array(text(MAX_ADDRESS_CHARS), MAX_NEW_ADDRESSES)),
        },
    )

    def _check(self) -> None:
        if len(self.joined) != len(self.incarnations):
            raise violation("a decision names a member without its incarnation")
        if any(low >= high for low, high in pairwise(self.gone)):
            raise violation("a decision does not name those that are gone in their order")
        _check_unique("a decision", self.joined)
        _check_unique("a decision", self.contributors)
        if len(self.weights) != len(self.contributors) or len(self.digest) not in (0, DIGEST_BYTES):
            raise violation("a decision has no weight for a contributor, or half a digest")
        if len(self.newcomers) != len(self.addresses):
            raise violation("a decision has an address of nobody")
        # The digest of a round that is yet to be computed is not known.
        has_vector = bool(self.num_elements and self.chunk_elements and self.codec)
        if has_vector != bool(self.contributors) or (self.digest and not has_vector):
            raise violation("contributors and an aggregate go together")

    def after(self, before: Sequence[Member]) -> Decision:
        """The decision, for somebody that knows the members before it.

        Raises:
            RemoteProtocolError: it names places that are none, a peer twice, or no member.
        """
        table = (*(member.peer for member in before), *self.joined)
        peers_at(self.gone, table[: len(before)])
        gone = {*self.gone}
        joined = zip(self.joined, self.incarnations, strict=True)
        stay = (member for place, member in enumerate(before) if place not in gone)
        members = (*stay, *(Member(*one) for one in joined))
        if not members:
            raise violation("a decision leaves no member")
        if len(members) > MAX_GROUP_MEMBERS:
            raise over_limit(f"a group has at most {MAX_GROUP_MEMBERS} members")
        peers = tuple(member.peer for member in members)
        contributors = peers_at(self.contributors, table)
        _check_unique("a decision", peers)
        _check_unique("a decision", contributors)
        return Decision(
            self.index,
            self.round,
            peers,
            tuple(member.incarnation for member in members),
            contributors,
            self.weights,
            self.digest,
            self.num_elements,
            self.chunk_elements,
            self.codec,
            holders=peers_at(self.holders, table),
            newcomers=peers_at(self.newcomers, table),
            addresses=self.addresses,
        )


@dataclass(frozen=True, slots=True)
class Plan(ControlPayload):
    """A reduction, as `averaging.plan.ReductionPlan` has it; fields by the same names, peers by their places.

    What it shares with the decision that is proposed, that says: members and weights, elements and the form of the
    result.
    """

    reduction: int
    reducers: tuple[int, ...]
    cuts: tuple[int, ...]
    codec: str
    aggregator: str
    way: str
    rows: tuple[int, ...] = ()
    row_reducers: tuple[int, ...] = ()

    _map = Map(
        "a plan",
        {
            "reduction": uint(MAX_U64, smallest=1),
            "reducers": optional(_PLACES),
            "cuts": optional(array(uint(MAX_U32), MAX_GROUP_MEMBERS * 3 // 2)),
            "codec": _NAME,
            "aggregator": _NAME,
            "way": one_of({"butterfly", "everybody", "grid"}),
            "rows": optional(_ROWS),
            "row_reducers": optional(_ROWS),
        },
    )

    def _check(self) -> None:
        _check_unique("a plan", self.reducers)
        if self.way == "grid":
            self._check_grid()
            return
        if self.rows or self.row_reducers:
            raise violation("a plan has rows, and is no grid")
        if self.way == "everybody":
            if self.reducers or self.cuts:
                raise violation("a plan in which everybody aggregates names reducers")
            return
        _check_cuts(self.cuts, len(self.reducers))

    def _check_grid(self) -> None:
        for ends in (self.rows, self.row_reducers):
            if len(ends) < 3 or ends[0] != 0 or any(a >= b for a, b in pairwise(ends)):
                raise violation("a grid does not give each member and each reducer to one row")
        num_rows = len(self.rows) - 1
        if len(self.row_reducers) != num_rows + 1 or self.row_reducers[-1] != len(self.reducers):
            raise violation("a grid has not the reducers of each row")
        if len(self.cuts) != len(self.reducers) + num_rows:
            raise violation("a grid does not give each chunk to one reducer of each row")
        for row, (low, high) in enumerate(pairwise(self.row_reducers)):
            _check_cuts(self.cuts[low + row : high + row + 1], high - low)
        if len({self.cuts[high + row] for row, high in enumerate(self.row_reducers[1:])}) != 1:
            raise violation("the rows of a grid do not have the same chunks")


def _check_cuts(cuts: Sequence[int], num_reducers: int) -> None:
    spans = len(cuts) == num_reducers + 1 and num_reducers > 0
    if not spans or cuts[0] != 0 or any(low > high for low, high in pairwise(cuts)):
        raise violation("a plan does not give each chunk to one reducer")


@dataclass(frozen=True, slots=True)
class Proposal(ControlPayload):
    """Proposal of a leader: what its group is to decide next.

    Attributes:
        attempt: u64, from 1: with the term of the message it is a ballot.
        decision: an encoded `Decision`, to be accepted as it is; of a round that is yet to be computed, without its
            digest.
        plan: an encoded `Plan`, of a round that is yet to be computed; else empty.
        acceptors: places of the members that are to accept it, or to compute it.
    """

    attempt: int
    decision: bytes
    acceptors: tuple[int, ...]
    plan: bytes = b""

    _map = Map(
        "a proposal",
        {
            "attempt": uint(MAX_U64, smallest=1),
            "decision": binary(_MAX_NESTED, smallest=1),
            "acceptors": _PLACES,
            "plan": optional(binary(_MAX_NESTED)),
        },
    )

    def _check(self) -> None:
        _check_unique("a proposal", self.acceptors)


@dataclass(frozen=True, slots=True)
class Lead(ControlPayload):
    """Message of a leader to a member: decisions that were made since, and the proposal for the next one.

    Attributes:
        term: u64, the leader's, from 1.
        index: u64, of the last decision.
        decisions: encoded decisions that the member does not have, in order, as many as are kept and fit.
        proposal: an encoded `Proposal` for the decision after `index`; empty for none, or for one that
            the member has looked at.
        waits_for: peer ids of members that the group waits for, for people.
    """

    term: int
    index: int
    decisions: tuple[bytes, ...] = ()
    proposal: bytes = b""
    waits_for: tuple[str, ...] = ()

    _map = Map(
        "Lead",
        {
            "term": uint(MAX_U64, smallest=1),
            "index": uint(MAX_U64),
            "decisions": optional(array(binary(_MAX_NESTED, smallest=1), MAX_TOLD_DECISIONS)),
            "proposal": optional(binary(_MAX_NESTED)),
            "waits_for": optional(_PEERS),
        },
    )


@dataclass(frozen=True, slots=True)
class Status(ControlPayload):
    """Status of a member, as it tells its leader.

    Attributes:
        incarnation: u64, the sender's.
        term: u64, the greatest that it has promised.
        index: u64, of the last decision that it has.
        ready_round: u64, the round that it has a vector for; 0 for none.
        weight: how much the vector counts.
        accepted_term, accepted_attempt, accepted: the ballot and the digest of what it has accepted for the decision
            after `index`; 0 and empty for nothing. The digest of a decision that is no round is empty.
        seen_attempt: u64, the latest attempt of this term that it has looked at after `index`; 0 for none.
        failed_attempt: u64, the attempt of this term that it could not do its part of; 0 for none.
        lost: peer ids of those that are to blame for that; the sender's own where it is to blame itself.
        reasons: one line for each, for people.
        bandwidth: bytes a second that it can send and receive; 0 for a member that reduces nothing, since nobody can
            dial it; 1 where it is not known.
        observes: it contributes nothing for now: no round waits for it.
    """

    incarnation: int
    term: int
    index: int
    ready_round: int = 0
    weight: float = 0.0
    accepted_term: int = 0
    accepted_attempt: int = 0
    accepted: bytes = b""
    seen_attempt: int = 0
    failed_attempt: int = 0
    lost: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    bandwidth: float = 0.0
    observes: bool = False

    _map = Map(
        "Status",
        {
            "incarnation": uint(MAX_U64),
            "term": uint(MAX_U64),
            "index": uint(MAX_U64),
            "ready_round": optional(uint(MAX_U64)),
            "weight": optional(_WEIGHT),
            "accepted_term": optional(uint(MAX_U64)),
            "accepted_attempt": optional(uint(MAX_U64)),
            "accepted": optional(_DIGEST),
            "seen_attempt": optional(uint(MAX_U64)),
            "failed_attempt": optional(uint(MAX_U64)),
            "lost": optional(_PEERS),
            "reasons": optional(array(text(_MAX_REASON), MAX_GROUP_MEMBERS)),
            "bandwidth": optional(number(0.0, MAX_WEIGHT)),
            "observes": optional(BOOLEAN),
        },
    )

    @property
    def ballot(self) -> Ballot:
        """The ballot of what was accepted; (0, 0) for nothing."""
        return Ballot(self.accepted_term, self.accepted_attempt)

    def _check(self) -> None:
        if len(self.accepted) not in (0, DIGEST_BYTES):
            raise violation("Status has half a digest")
        if len(self.reasons) != len(self.lost):
            raise violation("Status names a lost peer without the reason")


@dataclass(frozen=True, slots=True)
class Candidate(ControlPayload):
    """A member would lead.

    Attributes:
        incarnation: u64, the sender's.
        term: u64, greater than any that it knows of.
        index: u64, of the last decision that it has.
        decisions: the last encoded decisions that it has, in order: a member that is behind may not know it yet.
    """

    incarnation: int
    term: int
    index: int
    decisions: tuple[bytes, ...] = ()

    _map = Map(
        "Candidate",
        {
            "incarnation": uint(MAX_U64),
            "term": uint(MAX_U64, smallest=1),
            "index": uint(MAX_U64),
            "decisions": optional(array(binary(_MAX_NESTED, smallest=1), MAX_TOLD_DECISIONS)),
        },
    )


@dataclass(frozen=True, slots=True)
class Promise(ControlPayload):
    """A member follows a candidate, and will accept nothing of a lesser term; or it refuses, and says what is news.

    Attributes:
        incarnation: u64, the sender's.
        term: u64, the candidate's.
        index: u64, of the last decision that the sender has.
        decisions: encoded decisions that the candidate lacks, in order.
        accepted_term, accepted_attempt: the ballot of what the sender has accepted after `index`; 0 for nothing.
        accepted: the encoded `Decision` of that.
        refuses: it promises nothing.
    """

    incarnation: int
    term: int
    index: int
    decisions: tuple[bytes, ...] = ()
    accepted_term: int = 0
    accepted_attempt: int = 0
    accepted: bytes = b""
    refuses: bool = False

    _map = Map(
        "Promise",
        {
            "incarnation": uint(MAX_U64),
            "term": uint(MAX_U64, smallest=1),
            "index": uint(MAX_U64),
            "decisions": optional(array(binary(_MAX_NESTED, smallest=1), MAX_TOLD_DECISIONS)),
            "accepted_term": optional(uint(MAX_U64)),
            "accepted_attempt": optional(uint(MAX_U64)),
            "accepted": optional(binary(_MAX_NESTED)),
            "refuses": optional(BOOLEAN),
        },
    )

    @property
    def ballot(self) -> Ballot:
        """The ballot of what was accepted; (0, 0) for nothing."""
        return Ballot(self.accepted_term, self.accepted_attempt)

    def _check(self) -> None:
        if bool(self.accepted) != (self.ballot > Ballot(0, 0)):
            raise violation(
                "a promise has a ballot without a decision, or a decision without its ballot"
            )


@dataclass(frozen=True, slots=True)
class Join(ControlPayload):
    """A peer would be a member.

    Attributes:
        incarnation: u64, chosen at random for this.
        layout: the digest of names, shapes and order of its tensors.
        num_elements: of all of them together.
        addresses: multiaddrs that it can be dialled at; empty where nobody can.
        bandwidth: as in `Status`.
    """

    incarnation: int
    layout: bytes
    num_elements: int
    addresses: tuple[str, ...] = ()
    bandwidth: float = 0.0

    _map = Map(
        "Join",
        {
            "incarnation": uint(MAX_U64),
            "layout": binary(DIGEST_BYTES, smallest=DIGEST_BYTES),
            "num_elements": uint(MAX_U64, smallest=1),
            "addresses": optional(array(text(MAX_ADDRESS_CHARS), 16)),
            "bandwidth": optional(number(0.0, MAX_WEIGHT)),
        },
    )


@dataclass(frozen=True, slots=True)
class Joined(ControlPayload):
    """The answer to a `Join`, as soon as the group has decided on it; or where to ask instead.

    Attributes:
        term: u64, the leader's.
        decisions: the last encoded decisions, in order; by the last of them the asking peer is a member. Empty where
            another leads, which is then the one peer that is named.
        settings: the encoded settings of the group, a map.
        peers, addresses: multiaddrs of members, each with the peer id that it belongs to.
        before, incarnations: the members before the first of the decisions.
    """

    term: int
    decisions: tuple[bytes, ...]
    settings: bytes
    peers: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    incarnations: tuple[int, ...] = ()

    _map = Map(
        "Joined",
        {
            "term": uint(MAX_U64, smallest=1),
            "decisions": optional(array(binary(_MAX_NESTED, smallest=1), MAX_TOLD_DECISIONS)),
            "settings": binary(64 * 1024, smallest=1),
            "peers": optional(array(_PEER, 16 * MAX_GROUP_MEMBERS)),
            "addresses": optional(array(text(MAX_ADDRESS_CHARS), 16 * MAX_GROUP_MEMBERS)),
            "before": optional(_PEERS),
            "incarnations": optional(array(uint(MAX_U64), MAX_GROUP_MEMBERS)),
        },
    )

    def _check(self) -> None:
        if len(self.peers) != len(self.addresses):
            raise violation("Joined has an address of nobody")
        if len(self.before) != len(self.incarnations):
            raise violation("Joined names a member without its incarnation")
        _check_unique("Joined", self.before)


@dataclass(frozen=True, slots=True)
class Leave(ControlPayload):
    """A member goes.

    Attributes:
        incarnation: u64, the sender's.
        reason: one line, for people; empty for none.
        ends_group: the leader ends the group: nobody is to take over.
    """

    incarnation: int
    reason: str = ""
    ends_group: bool = False

    _map = Map(
        "Leave",
        {
            "incarnation": uint(MAX_U64),
            "reason": optional(line(MAX_ERROR_CHARS)),
            "ends_group": optional(BOOLEAN),
        },
    )


@dataclass(frozen=True, slots=True)
class StateInfo(ControlPayload):
    """The state that a member has, for one that has just joined: it is the same for all after the same round.

    Attributes:
        round: u64, the last round that is in it.
        digests: of its vectors, 32 bytes each, by which they are fetched as the result of a reduction is.
        sizes: float32 elements of each.
        chunk_elements: u32, elements of a chunk of each.
        note: bytes that mean something to the program; at most `MAX_NOTE_BYTES`.
    """

    round: int
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]
    chunk_elements: int
    note: bytes = b""

    _map = Map(
        "StateInfo",
        {
            "round": uint(MAX_U64),
            "digests": array(binary(DIGEST_BYTES, smallest=DIGEST_BYTES), MAX_STATE_VECTORS),
            "sizes": array(uint(MAX_U64, smallest=1), MAX_STATE_VECTORS),
            "chunk_elements": uint(MAX_U32, smallest=1),
            "note": optional(binary(MAX_NOTE_BYTES)),
        },
    )

    def _check(self) -> None:
        if len(self.digests) != len(self.sizes):
            raise violation("StateInfo does not give each vector its size")
