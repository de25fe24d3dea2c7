"""Vectors of what a decision and its plan say to a member that knows the members before them."""

from __future__ import annotations

from typing import Any

import pytest

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.rounds.plans import read_plan, write_plan
from neurogrid.training.wire import Decision, DecisionPayload, Member, Plan, table_of
from tests.unit.vectors import in_turn

FILE = "training_decisions"


def read_case(case: Any) -> tuple[list[Member], Decision, ReductionPlan | None]:
    """The members before, the decision, and the plan if the case has one."""
    before = [Member(peer, int(incarnation)) for peer, incarnation in case["before"]]
    decision = DecisionPayload.decode(bytes.fromhex(case["decision"])).after(before)
    if "plan" not in case:
        return before, decision, None
    told = Plan.decode(bytes.fromhex(case["plan"]))
    return before, decision, read_plan(told, decision, table_of(decision, before))


@in_turn(FILE, where=lambda case: case["result"] == "valid")
def test_what_is_told_is_read_and_written_again(name: str, case: Any) -> None:
    before, decision, plan = read_case(case)
    assert decision.members == tuple((peer, int(number)) for peer, number in case["members"])
    for part in ("contributors", "holders", "newcomers"):
        assert list(getattr(decision, part)) == case.get(part, [])
    assert decision.encode(before).hex() == case["decision"]
    if plan is not None:
        assert list(plan.reducers) == case["reducers"]
        assert (plan.members, plan.weights) == (decision.contributors, decision.weights)
        told = write_plan(plan, table_of(decision, before))
        assert told.encode().hex() == case["plan"]


@in_turn(FILE, where=lambda case: case["result"] == "invalid")
def test_what_cannot_be_is_refused(name: str, case: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read_case(case)
    assert ErrorCode(caught.value.code).name == case["error"]
