"""Strategies for the properties of the codec: numbers, messages, and bytes that are nearly right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from neurogrid.p2p import wire

__all__ = [
    "BRIEF",
    "LAYER",
    "LINE",
    "SPAN",
    "TOKENS",
    "U32",
    "U64",
    "UNHURRIED",
    "V10_MESSAGES",
    "V11_MESSAGES",
    "mutated",
]

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
LAYER = st.integers(0, wire.MAX_LAYERS - 1)
TOKENS = st.integers(1, 2**32 - 1)
LINE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)
SPAN = st.tuples(LAYER, st.integers(1, wire.MAX_LAYERS)).filter(lambda s: s[0] < s[1])
# Without deadlines: how long an example takes on a busy machine says nothing of the codec.
UNHURRIED = settings(deadline=None)
BRIEF = settings(deadline=None, max_examples=50)

TRACES = st.builds(
    wire.TraceContext,
    st.binary(min_size=16, max_size=16).filter(any),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 255),
)


@st.composite
def messages(draw: st.DrawFn, types: frozenset[wire.MessageType | None]) -> wire.TensorMessage:
    msg_type = draw(st.sampled_from(sorted(types, key=lambda t: t or 0)))
    legacy = msg_type is None
    largest = min(200, wire.DEFAULT_LIMITS.for_type(msg_type))
    return wire.TensorMessage(
        msg_type,
        layer_id=draw(st.integers(0, 2**24 - 1) if legacy else U32),
        seq_id=draw(U64),
        request_id=0 if legacy else draw(U64),
        data=draw(st.binary(max_size=largest)),
        trace_context=draw(st.none() | TRACES)
        if msg_type is not None and msg_type.traits.traces
        else None,
    )


V10_MESSAGES = messages(frozenset(wire.v10_table().by_number.values()) | {None})
V11_MESSAGES = messages(frozenset(wire.v11_table().by_number.values()))


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """Valid bytes with some of them changed, cut out or put in."""
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)
