"""What waits at a stage: kept once, from whom it may come, until its turn; whatever order it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.stages.inbox import Sources, StageInbox, sources_of, takers_of_tied
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
    return StageInbox(SESSION, CHAIN, STEP, sources(index, num_stages))


def sources(index: int, num_stages: int = 4) -> Sources:
    """Who may send what to a stage of one member, in a chain of such."""
    return sources_of([(peer,) for peer in PEERS[:num_stages]], PEERS[index], LEADER)


def sent(**kinds: str) -> dict[RunMessage, frozenset[str]]:
    return {RunMessage[kind]: frozenset(peers.split()) for kind, peers in kinds.items()}


def test_each_stage_is_sent_what_its_place_needs() -> None:
    first, second, last = (sources(index, 3) for index in range(3))
    assert first == sent(TOKENS=LEADER, GRADIENT="b", TIED="c")
    assert second == sent(HIDDEN="a", GRADIENT="c")
    assert last == sent(HIDDEN="b", LABELS=LEADER, TIED="a")
    assert sources(0, 1) == sent(TOKENS=LEADER, LABELS=LEADER)
    # What hidden states in a subspace are a part of, their token ids say.
    found = sources_of([("a",), ("b",)], "b", LEADER, has_subspace=True)
    assert found == sent(TOKENS=LEADER, HIDDEN="a", LABELS=LEADER, TIED="a")
    # Where nothing is tied, the ends send each other nothing.
    found = sources_of([("a",), ("b",), ("c",)], "c", LEADER, is_tied=False)
    assert found == sent(HIDDEN="b", LABELS=LEADER)


def test_each_member_of_a_stage_is_sent_what_its_place_needs() -> None:
    stages = (("a", "b", "c"), ("d",), ("e", "f"))
    assert sources_of(stages, "b", LEADER) == sent(TOKENS=LEADER, GRADIENT="d", TIED="f")
    assert sources_of(stages, "c", LEADER) == sent(TOKENS=LEADER, GRADIENT="d", TIED="e")
    assert sources_of(stages, "d", LEADER) == sent(HIDDEN="a b c", GRADIENT="e f")
    assert sources_of(stages, "f", LEADER) == sent(HIDDEN="d", LABELS=LEADER, TIED="b")


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
def test_what_is_tied_goes_to_all_of_the_other_end_once(
    num_first: int, num_last: int, num_between: int
) -> None:
    stages = [
        [f"first {lane}" for lane in range(num_first)],
        *([f"between {index}"] for index in range(num_between)),
        [f"last {lane}" for lane in range(num_last)],
    ]
    for own, other in ((stages[0], stages[-1]), (stages[-1], stages[0])):
        given = [(taker, peer) for peer in own for taker in takers_of_tied(stages, peer)]
        assert sorted(taker for taker, _ in given) == sorted(other)
        for taker, peer in given:
            assert sources_of(stages, taker, LEADER)[RunMessage.TIED] == frozenset({peer})


def test_members_of_a_stage_may_send_the_same_micro_batch_and_one_is_taken() -> None:
    """Which of them is on its route, the step says."""
    inbox = StageInbox(SESSION, CHAIN, STEP, sources_of((("a", "b"), ("c",)), "c", LEADER))
    inbox.put("a", tensor(RunMessage.HIDDEN))
    inbox.put("b", tensor(RunMessage.HIDDEN))
    with pytest.raises(RemoteProtocolError, match="twice"):
        inbox.put("b", tensor(RunMessage.HIDDEN))
    assert inbox.take(RunMessage.HIDDEN, 0, "b") is not None
    assert inbox.take(RunMessage.HIDDEN, 0, "b") is None
    inbox.advance()
    assert len(inbox) == 0


def test_what_was_taken_does_not_come_again() -> None:
    inbox = inbox_of(1)
    inbox.put("a", tensor(RunMessage.HIDDEN))
    assert inbox.take(RunMessage.HIDDEN, 0, "a") is not None
    with pytest.raises(RemoteProtocolError, match="hidden 0 of step 3 has come twice"):
        inbox.put("a", tensor(RunMessage.HIDDEN))


def test_only_micro_batches_of_the_step_are_kept() -> None:
    inbox = inbox_of(1)
    assert inbox.put("a", tensor(RunMessage.HIDDEN, 3))
    told = "hidden {} of step 3 has come, and that step has {} micro-batches"
    with pytest.raises(RemoteProtocolError, match=told.format(3, 3)):
        inbox.begin(3)
    inbox.begin(4)
    with pytest.raises(RemoteProtocolError, match=told.format(4, 4)):
        inbox.put("a", tensor(RunMessage.HIDDEN, 4))
    assert inbox.put("a", tensor(RunMessage.HIDDEN, 4, step=STEP + 1))
    inbox.advance()
    with pytest.raises(RemoteProtocolError, match="hidden 4 of step 4"):
        inbox.begin(4)


def test_a_step_that_follows_an_evaluation_gets_nothing_of_it() -> None:
    inbox = inbox_of(1)
    inbox.put("a", tensor(RunMessage.HIDDEN, 0))
    inbox.put("a", tensor(RunMessage.HIDDEN, 5))
    assert inbox.take(RunMessage.HIDDEN, 0, "a") is not None
    inbox.end_evaluation()
    assert len(inbox) == 0
    assert inbox.put("a", tensor(RunMessage.HIDDEN, 0))
    assert inbox.put("a", tensor(RunMessage.HIDDEN, 0, step=STEP + 1))
    inbox.end_evaluation()
    assert len(inbox) == 1


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
    may = sources(index)
    for code, number, step, chain, sender in come:
        given_tensor = tensor(code, number, step=step, chain=chain)
        is_due = (
            chain == CHAIN
            and sender in may.get(code, ())
            and step in (STEP, STEP + 1)
            and (code, step, number, sender) not in kept
        )
        if chain < CHAIN or (chain == CHAIN and step < STEP):
            assert not inbox.put(sender, given_tensor)
        elif is_due:
            assert inbox.put(sender, given_tensor)
            kept.add((code, step, number, sender))
        else:
            with pytest.raises(RemoteProtocolError):
                inbox.put(sender, given_tensor)
        assert len(inbox) == len(kept)
    for code, step, number, sender in sorted(kept, key=str):
        taken = inbox.take(code, number, sender)
        assert (taken is not None) == (step == STEP)
        assert inbox.take(code, number, sender) is None
    inbox.advance()
    assert len(inbox) == sum(step == STEP + 1 for _, step, *_ in kept)
    for code, step, number, sender in kept:
        if step == STEP + 1:
            assert inbox.take(code, number, sender) is not None
    assert len(inbox) == 0


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
