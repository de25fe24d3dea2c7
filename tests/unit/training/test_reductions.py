from __future__ import annotations
import pytest, torch, trio
from neurogrid.training.averaging.plan import Way
from tests.unit.training.reducing import *


@pytest.mark.parametrize("num", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", ["f32", "f16"])
@pytest.mark.parametrize("agg", ["mean", "median"])
@pytest.mark.parametrize("way", list(Way))
async def test_all_get_the_same(num, codec, agg, way):
    async with open_group(num) as group:
        ids = [p.peer_id for p in group.peers]
        plan = plan_of(
            ids,
            1050,
            codec=codec,
            result_codec=codec,
            aggregator=agg,
            way=way,
            weights=[i + 1.0 for i in range(num)],
        )
        values = vectors(num, 1050)
        outs = await reduce_all(group.peers, plan, values)
        want = expected(plan, values)
        for o in outs:
            assert o.error is None
            assert torch.equal(o.result.values, want)
        assert len({o.result.digest for o in outs}) == 1
