"""What waits at a stage: kept once, from whom it may come, until its turn; whatever order it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.stages.inbox import StageInbox, sources_of
from neurogrid.training.wire.runs import RunMessage, StageTensor

PEERS = ("a", "b", "c", "d")
LEADER = "leader"
SESSION, CHAIN, STEP = 7, 5, 3
KINDS = (
    RunMessage.TOKENS,
    RunMessage.LABELS,
    RunMessage.HIDDEN,
    RunMessage.GRADIENT,
    RunMessage.TIED,
)


def tensor(
    code: RunMessage,
    number: int = 0,
    *,
    step: int = STEP,
    chain: int = CHAIN,
    session: int = SESSION,
) -> StageTensor:
    dtype = "I32" if code in (RunMessage.TOKENS, RunMessage.LABELS) else "F32"
    shape = (1, 1, 1) if code in (RunMessage.HIDDEN, RunMessage.GRADIENT) else (1, 1)
    return StageTensor(code, session, chain, step, number, dtype, shape, bytes(4))


def inbox_of(index: int, num_stages: int = 4) -> StageInbox:
    return StageInbox(SESSION, CHAIN, STEP, sources_of(index, PEERS[:num_stages], LEADER))


def test_each_stage_is_sent_what_its_place_needs() -> None:
    first, second, last = (sources_of(index, PEERS[:3], LEADER) for index in range(3))
    assert first == {
        RunMessage.TOKENS: LEADER,
        RunMessage.GRADIENT: "b",
        RunMessage.TIED: "c",
    }
    assert second == {RunMessage.HIDDEN: "a", RunMessage.GRADIENT: "c"}
    assert last == {RunMessage.HIDDEN: "b", RunMessage.LABELS: LEADER, RunMessage.TIED: "a"}
    assert sources_of(0, PEERS[:1], LEADER) == {
        RunMessage.TOKENS: LEADER,
        RunMessage.LABELS: LEADER,
    }


@given(
    index=st.integers(0, 3),
    come=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(0, 3),
            st.integers(STEP - 1, STEP + 2),
            st.sampled_from([CHAIN - 1, CHAIN, CHAIN + 1]),
            st.sampled_from([*PEERS, LEADER]),
        )
    ),
)
def test_only_what_is_due_is_kept_and_once(
    index: int, come: list[tuple[RunMessage, int, int, int, str]]
) -> None:
    inbox, kept = inbox_of(index), set()
    sources = sources_of(index, PEERS, LEADER)
    for code, number, step, chain, sender in come:
        given_tensor = tensor(code, number, step=step, chain=chain)
        is_due = (
            chain == CHAIN
            and sources.get(code) == sender
            and step in (STEP, STEP + 1)
            and (code, step, number) not in kept
        )
        if chain < CHAIN or (chain == CHAIN and step < STEP):
            assert not inbox.put(sender, given_tensor)
        elif is_due:
            assert inbox.put(sender, given_tensor)
            kept.add((code, step, number))
        else:
            with pytest.raises(RemoteProtocolError):
                inbox.put(sender, given_tensor)
        assert len(inbox) == len(kept)
    for code, step, number in sorted(kept, key=str):
        taken = inbox.take(code, number)
        assert (taken is not None) == (step == STEP)
        assert inbox.take(code, number) is None
    inbox.advance()
    assert len(inbox) == sum(step == STEP + 1 for _, step, _ in kept)
    for code, step, number in kept:
        assert (inbox.take(code, number) is not None) == (step == STEP + 1)


def test_what_is_of_another_run_is_dropped() -> None:
    inbox = inbox_of(1)
    assert not inbox.put("a", tensor(RunMessage.HIDDEN, session=SESSION + 1))
    assert len(inbox) == 0


def test_what_was_not_taken_of_a_step_is_dropped_with_it() -> None:
    inbox = inbox_of(1)
    inbox.put("a", tensor(RunMessage.HIDDEN, 0))
    inbox.advance()
    assert len(inbox) == 0
    assert not inbox.put("a", tensor(RunMessage.HIDDEN, 0))
    with pytest.raises(RemoteProtocolError, match="hidden 0 of step 6 is not due: step 4"):
        inbox.put("a", tensor(RunMessage.HIDDEN, 0, step=6))


def test_no_more_waits_than_two_steps_have() -> None:
    inbox = inbox_of(0)
    for step in (STEP, STEP + 1):
        for number in range(1024):
            inbox.put("d", tensor(RunMessage.TIED, number, step=step))
    with pytest.raises(RemoteProtocolError, match="2048 such tensors wait"):
        inbox.put("d", tensor(RunMessage.TIED, 1024))
