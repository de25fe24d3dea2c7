"""A sequence of tokens over workers that fail: which calls the next ones get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neurogrid.errors import NoRouteError, PeerRefusedError
from neurogrid.inference.generation import token_session
from neurogrid.inference.generation.ends_queue import Chosen
from neurogrid.inference.generation.kept_sessions import Beginning
from neurogrid.inference.generation.sight import SeenImages
from neurogrid.inference.generation.stored_prefixes import StoredPrefix, StoredPrefixes
from neurogrid.inference.generation.token_session import TokenSession
from neurogrid.inference.pipeline.prefill import Bounds
from neurogrid.inference.pipeline.selection import Selection
from neurogrid.inference.pipeline.session_worker import Prior
from neurogrid.model.images.places import ImagePlaces, ImageWay
from neurogrid.p2p.wire import ErrorCode, ImageSpan


@dataclass
class Pipeline:
    """Workers that note what they are to compute, or fail at it.

    Attributes:
        length: tokens that they have.
        calls: first token and end of each.
    """

    length: int
    fails: bool
    calls: list[Bounds] = field(default_factory=list)
    peer_ids: tuple[str, ...] = ("a worker",)
    takes_chunks: bool = True

    async def forward(self, hidden_BTD: torch.Tensor, batch: Any = ()) -> torch.Tensor:
        return await self.prefill([(self.length, self.length + hidden_BTD.shape[1])], None, None)

    async def prefill(self, calls: list[Bounds], embed: Any, take: Any) -> torch.Tensor:
        if self.fails:
            raise NoRouteError("it is gone", layers=(0,), peer_id="a worker")
        self.calls += calls
        self.length = calls[-1][1]
        return torch.zeros(1, 1, 4)

    async def aclose(self) -> None:
        """Do nothing."""


async def nothing(*args: object) -> None:
    """Do nothing."""


async def embed(token_ids: list[int], **more: object) -> torch.Tensor:
    return torch.zeros(1, len(token_ids), 4)


async def choose(hidden_BTD: torch.Tensor, **more: Any) -> tuple[Chosen[Any], None]:
    return more["choose"](hidden_BTD[0, -1]), None


def surroundings(select: Callable[..., Any], **more: Any) -> Any:
    """What a session asks of others, in one."""
    return SimpleNamespace(
        forget=lambda number: None,
        embed=embed,
        leave=nothing,
        choose=choose,
        trials=SimpleNamespace(give_way=nothing),
        select=select,
        should_leave=lambda selection: False,
        keep=lambda *args: False,
        **more,
    )


@pytest.mark.parametrize("repeats", [False, True])
async def test_workers_fail_in_the_first_step_of_a_session_that_goes_on_from_another(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    """All of the earlier session is one call to those that take over, where its calls need not be repeated."""
    opened: list[Pipeline] = []

    async def open_session(stages: object, routing: object, *, prior: Prior | None, **more: Any):  # type: ignore[no-untyped-def]
        opened.append(Pipeline(prior.num_tokens if prior else 0, fails=not opened))
        return opened[-1]

    monkeypatch.setattr(token_session, "open_session", open_session)
    selection: Any = Selection(())
    monkeypatch.setattr(Selection, "has_same_bits", not repeats)

    async def select(**more: Any) -> Any:
        return selection

    decoded = [20, *[1] * 10]
    earlier: Any = SimpleNamespace(
        pipeline=SimpleNamespace(session_id=7), selection=selection, calls=decoded
    )
    beginning = Beginning(None, 64, b"", kept=earlier, num_tokens=30)  # type: ignore[arg-type]

    def taken(beginning: Beginning) -> None:
        beginning.kept = None

    others = surroundings(select, failed=lambda error, selection: True, taken=taken)
    async with TokenSession(
        others,
        others,
        others,
        others,
        others,
        beginning,
        number=1,
        max_length=64,
        patience=60.0,
        replays=True,
        max_piece=None,
    ) as session:
        assert await session.extend(range(40), lambda logits_V: Chosen("next", 5)) == ["next"]
        assert session.num_reused == 30
        assert await session.extend([5], lambda logits_V: Chosen("last", None)) == ["last"]
    before = [(0, 20), *((start, start + 1) for start in range(20, 30))] if repeats else [(0, 30)]
    assert [each.calls for each in opened] == [[], [*before, (30, 40), (40, 41)]]


@pytest.mark.parametrize("num_times", [1, 2])
async def test_a_worker_that_dropped_the_session_is_asked_for_another_once(
    monkeypatch: pytest.MonkeyPatch, num_times: int
) -> None:
    """It was idle for too long, as where its reader took its time: nobody else has the layers, and nobody need."""
    opened: list[Pipeline] = []

    class Forgetful(Pipeline):
        async def prefill(self, calls: list[Bounds], embed: Any, take: Any) -> torch.Tensor:
            if self.fails:
                text = "session 7 is not open"
                error = NoRouteError(text, layers=(0,), peer_id="a worker")
                raise error from PeerRefusedError(text, code=ErrorCode.SESSION_UNKNOWN, text=text)
            return await super().prefill(calls, embed, take)

    async def open_session(*args: object, **more: Any) -> Pipeline:
        opened.append(Forgetful(0, fails=0 < len(opened) < num_times))
        return opened[-1]

    monkeypatch.setattr(token_session, "open_session", open_session)
    selection: Any = Selection(())
    monkeypatch.setattr(Selection, "has_same_bits", True)

    async def select(**more: Any) -> Any:
        return selection

    others = surroundings(
        select,
        failed=lambda error, selection: False,
        has_alternative=lambda *args, **more: False,
        stored=SimpleNamespace(best=lambda *args: None),
    )
    async with TokenSession(
        *(others, others, others, others, others),
        Beginning(others, 64, b""),
        number=1,
        max_length=64,
        patience=60.0,
        replays=False,
        max_piece=None,
    ) as session:
        assert await session.extend(range(40), lambda logits_V: Chosen("next", 5)) == ["next"]
        opened[0].fails = True
        step = session.extend([5], lambda logits_V: Chosen("last", None))
        if num_times == 1:
            assert await step == ["last"]
            assert opened[-1].calls == [(0, 40), (40, 41)]
        else:
            with pytest.raises(NoRouteError, match="is not open"):
                await step
    assert len(opened) == 2


async def test_a_text_on_disk_with_the_tokens_of_an_image_is_no_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may send those tokens as text: a conversation with an image there does not begin with that."""
    tokens = [*range(300), 7, 7, 7, 7, *range(50)]

    async def open_session(*args: object, prior: Prior | None = None, **more: Any) -> Pipeline:
        return Pipeline(prior.num_tokens if prior else 0, fails=False)

    monkeypatch.setattr(token_session, "open_session", open_session)
    selection: Any = Selection(())

    async def select(**more: Any) -> Any:
        return selection

    stored = StoredPrefixes(shortest_cut=lambda length: 0, replays=False)
    stored.add(StoredPrefix(tuple(tokens[:320]), (320,), b"", ()))
    others = surroundings(select, stored=stored)
    image = SeenImages(
        ImagePlaces((ImageSpan(300, 2, 2),), ImageWay.AS_TEXT), (b"a" * 32,), (torch.zeros(4, 4),)
    )
    for images, num_reused in ((None, 320), (image, 300)):
        async with TokenSession(
            *(others, others, others, others, others),
            Beginning(others, 400, b""),
            number=1,
            max_length=400,
            patience=60.0,
            replays=False,
            max_piece=None,
            images=images,
        ) as session:
            await session.extend(tokens, lambda logits_V: Chosen("next", None))
            assert session.num_reused == num_reused
