"""Plans of a stage's reductions: the same for all of its members, and a sound one for any vector."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.stages.reduction_plans import reduction_plan

RUN = bytes(range(16))


@given(
    st.integers(1, 8),
    st.sets(st.integers(0, 7)),
    st.integers(1, 10**9),
    st.sampled_from(["f32", "bf16", "int8"]),
)
def test_all_of_a_vector_is_reduced_once_by_those_that_can_be_dialled(
    num_members: int, dialled: set[int], num_elements: int, codec: str
) -> None:
    members = [f"peer {number}" for number in range(num_members)]
    reducers = [peer for number, peer in enumerate(members) if number in dialled]
    plan = reduction_plan(
        RUN, 3, 7, 1, 0, members=members, reducers=reducers, num_elements=num_elements, codec=codec
    )
    assert plan.reducers == (tuple(reducers) or tuple(members[:1]))
    assert plan.chunk_elements % parse_codec(codec).block == 0
    reduced = [chunk for peer in plan.reducers for chunk in plan.chunks_of(peer)]
    assert reduced == list(range(plan.num_chunks)) if plan.num_chunks < 10**5 else True
    counts = [len(plan.chunks_of(peer)) for peer in plan.reducers]
    assert max(counts) - min(counts) <= 1
    assert plan.weights == (1.0,) * num_members


def test_each_reduction_has_a_number_of_its_own() -> None:
    numbers = {
        reduction_plan(
            run, chain, step, stage, number, members=["a", "b"], reducers=["a"], num_elements=5
        ).reduction
        for run in (RUN, bytes(16))
        for chain in (1, 2)
        for step in (0, 1)
        for stage in (0, 1)
        for number in (0, 1, 2)
    }
    assert len(numbers) == 48


def test_the_number_of_a_reduction_is_the_specification_s() -> None:
    plan = reduction_plan(RUN, 1, 2, 3, 0, members=["a"], reducers=[], num_elements=1)
    # The first 8 bytes of SHA-256 over the bytes 0 to 15, and 1, 2, 3 and 0 as u64, big-endian.
    assert plan.reduction == 0x35E16CE96D7A49A9
