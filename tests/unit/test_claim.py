"""Claims on a worker: never two owners at once, none that outlives its time, and none that ends before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.worker.claim import SERVING, Claim

OWNERS = ("ann", "bob", "eve")
CLAIMED = st.tuples(
    st.sampled_from(OWNERS),
    st.sampled_from((SERVING, "training")),
    st.none() | st.integers(1, 10),
)
STEPS = st.lists(st.integers(1, 5) | st.sampled_from(OWNERS) | CLAIMED)


@given(STEPS)
def test_a_claim_holds_until_its_time_or_its_connection_ends(
    steps: list[int | str | tuple[str, str, int | None]],
) -> None:
    """Steps: time that goes on, a connection that ends, a claim for so long."""
    now, connected = 0, set(OWNERS)
    current: Claim | None = None
    is_over = True
    for step in steps:
        if isinstance(step, int):
            now += step
        elif isinstance(step, str):
            connected.discard(step)
            if current is not None and current.owner == step and current.until is None:
                assert not current.holds(now, is_connected=False)
                current, is_over = None, True
        else:
            owner, purpose, seconds = step
            connected.add(owner)
            claim = Claim(owner, purpose, None if seconds is None else now + seconds)
            is_allowed = current is None or current.allows(
                claim, now, is_connected=current.owner in connected
            )
            is_own = current is not None and (current.owner, current.purpose) == (owner, purpose)
            assert is_allowed == (is_over or is_own)
            if is_allowed:
                current = claim
        if current is not None:
            is_over = not current.holds(now, is_connected=current.owner in connected)
            ended = (
                current.owner not in connected if current.until is None else now >= current.until
            )
            assert is_over == ended


def test_claims_that_are_shared_stand_beside_each_other_and_others_do_not() -> None:
    shared, alone = Claim("ann", is_shared=True), Claim("bob")
    for connected in (True, False):
        assert shared.allows(Claim("eve", is_shared=True), 0.0, is_connected=connected)
    training = Claim("eve", "training", 10.0)
    for one, other in ((shared, alone), (alone, shared), (shared, training), (training, shared)):
        assert not one.allows(other, 0.0, is_connected=True)
        assert one.allows(other, 20.0, is_connected=False)
