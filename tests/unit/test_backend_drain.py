"""A server that goes from one coordinator to the next: what is being answered ends first, and nothing is cut off."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from neurogrid.server.backend import DRAIN_PATIENCE, Backend
from neurogrid.server.errors import APIError


class Ready:
    """As much of a coordinator as a backend looks at."""

    why_not_ready = None


async def test_nobody_is_refused_before_the_moment_without_requests_has_come(
    autojump_clock: MockClock,
) -> None:
    backend, old, new = Backend(), Ready(), Ready()
    one: Any = old
    async with trio.open_nursery() as nursery:

        async def ask(seconds: float) -> None:
            with backend.request() as coordinator:
                assert coordinator is one
                await trio.sleep(seconds)
                assert coordinator is one

        with backend.serving(one):
            nursery.start_soon(ask, 3.0)
            await trio.sleep(1.0)
            nursery.start_soon(ask, DRAIN_PATIENCE - 4.0)
            began = trio.current_time()
            await backend.drain("soon")
            assert trio.current_time() == began + DRAIN_PATIENCE - 4.0
            assert backend.why_not_ready == "soon"
        with pytest.raises(APIError, match="not ready: soon"), backend.request():
            pass
        one = new
        with backend.serving(one):
            assert backend.why_not_ready is None
            await ask(1.0)


async def test_those_who_come_without_a_break_are_refused_after_a_while(
    autojump_clock: MockClock,
) -> None:
    backend, num_refused, num_answered = Backend(), 0, 0
    one: Any = Ready()

    async def ask_on() -> None:
        nonlocal num_refused, num_answered
        while True:
            try:
                with backend.request():
                    await trio.sleep(3.0)
                    num_answered += 1
            except APIError:
                num_refused += 1
                return

    async with trio.open_nursery() as nursery:
        with backend.serving(one):
            nursery.start_soon(ask_on)
            await trio.sleep(1.5)
            nursery.start_soon(ask_on)
            await backend.drain("soon")
            assert num_refused >= 1
            assert num_answered > DRAIN_PATIENCE / 3
    assert num_refused == 2
