"""An error of ours leaves a nursery as itself, and cancellation as cancellation."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import NeuroGridError, ResponseTimeout, StreamBrokenError
from neurogrid.exception_groups import unwrap_errors


async def fail(error: BaseException) -> None:
    raise error


def run_in_nursery(*errors: BaseException) -> None:
    async def main() -> None:
        with unwrap_errors():
            async with trio.open_nursery() as outer, trio.open_nursery() as inner:
                for index, error in enumerate(errors):
                    (outer if index % 2 else inner).start_soon(fail, error)

    trio.run(main)


def test_one_error_leaves_as_itself_with_its_cause() -> None:
    error = StreamBrokenError("gone")
    error.__cause__ = OSError("the network")
    with pytest.raises(StreamBrokenError) as caught:
        run_in_nursery(error)
    assert caught.value is error
    assert isinstance(caught.value.__cause__, OSError)


def test_of_several_errors_of_ours_one_is_raised() -> None:
    with pytest.raises(NeuroGridError):
        run_in_nursery(StreamBrokenError("gone"), ResponseTimeout("late"))


def test_a_bug_beside_an_error_is_not_hidden() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run_in_nursery(StreamBrokenError("gone"), ZeroDivisionError())
    assert caught.value.split(ZeroDivisionError)[0] is not None


async def test_an_error_while_the_caller_is_cancelled_is_cancellation() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise StreamBrokenError("closed meanwhile")

    with trio.CancelScope() as scope:
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_when_cancelled)
                nursery.start_soon(trio.sleep_forever)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        pytest.fail("the caller went on")
    assert scope.cancelled_caught
