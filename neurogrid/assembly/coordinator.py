"""Opens a coordinator: plans, places, and puts together what a generation goes through.

async with open_coordinator(CoordinatorSettings(model=path, local_workers=2)) as coordinator:
    async for token_id in coordinator.generate(prompt_ids, max_tokens=64):
        ...
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from neurogrid.assembly.coordinator_settings import CoordinatorSettings
from neurogrid.assembly.memory_sharing import MemoryShare
from neurogrid.assembly.planned_fleet import open_plan
from neurogrid.assembly.verification import make_verification, require_room
from neurogrid.errors import ConfigurationError
from neurogrid.fleet.placing.memory_watch import watch_workers
from neurogrid.inference.board.progress import Progress, ProgressTee
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.cache_room import CacheRoom
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.draft_model import DraftModel
from neurogrid.inference.generation.ends_queue import open_ends
from neurogrid.inference.generation.kept_sessions import open_kept_sessions
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.selection import Selector
from neurogrid.inference.pipeline.slow_watch import SlowWatch
from neurogrid.inference.speculation.speculation import Speculation
from neurogrid.node.torch_thread import TorchThread

__all__ = ["open_coordinator"]

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_coordinator(
    settings: CoordinatorSettings,
    *,
    model: LoadedModel | None = None,
    progress: Progress | None = None,
    board: StatusBoard | None = None,
    share: MemoryShare | None = None,
) -> AsyncIterator[Coordinator]:
    """Load the model, gather workers, place the layers; ready when the block is entered.

    Args, and what may be raised before anything is sent: as for `open_plan`, and
        board: gathers what is known of it, for readers that want to look before it is there; None for one of its own.

    Raises:
        ConfigurationError: the draft model cannot be one for this model.
        NoRouteError: a worker was lost while it got its layers.
    """
    board = board or StatusBoard()
    progress = ProgressTee(board, progress) if progress else board
    async with AsyncExitStack() as stack:
        planned = await stack.enter_async_context(
            open_plan(settings, model=model, progress=progress, share=share)
        )
        model, fleet, protocol = planned.model, planned.fleet, planned.protocol
        if settings.verify:
            require_room(model)
        speculation = await _open_speculation(settings, model, stack, progress)
        await fleet.start()
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(fleet.mend)
        nursery.start_soon(watch_workers, fleet, progress)
        stack.callback(nursery.cancel_scope.cancel)
        ends = await stack.enter_async_context(
            open_ends(model.ends, shares_forward=model.traits.row_bounds is not None)
        )
        # For each layer, so that it holds for every plan.
        room = CacheRoom(
            [[cost] for cost in model.costs],
            max_sessions=planned.max_sessions,
            max_length=model.max_seq_len,
            max_waiting=settings.max_waiting,
        )
        selector = Selector(fleet)
        kept = await stack.enter_async_context(
            open_kept_sessions(
                room,
                fleet,
                selector,
                shortest_cut=model.ends.shortest_cut,
                replays=model.replays,
                is_enabled=settings.prefix_reuse and model.traits.takes_chunks,
            )
        )
        watch = SlowWatch(fleet, progress)
        nursery.start_soon(watch.run)
        routing = Routing(protocol, settings.routing, wire_dtype=settings.wire_dtype, watch=watch)
        verification = None
        if settings.verify:
            verification = make_verification(
                planned,
                routing,
                room,
                share=settings.verify,
                timeouts=settings.timeouts,
                progress=progress,
            )
            nursery.start_soon(verification.run)
        yield Coordinator(
            protocol,
            model,
            fleet,
            selector,
            routing,
            ends,
            kept,
            planned.adapters,
            patience=settings.patience,
            board=board,
            verification=verification,
            progress=progress,
            speculation=speculation,
        )


async def _open_speculation(
    settings: CoordinatorSettings, model: LoadedModel, stack: AsyncExitStack, progress: Progress
) -> Speculation | None:
    """Return the speculation that proposes tokens; None for none, which is said with the reason."""
    if settings.draft is not None and (settings.speculate == "off" or model.why_no_speculation):
        reason = model.why_no_speculation or "--speculate off forbids what it is for"
        raise ConfigurationError(f"--draft {settings.draft} is of no use: {reason}")
    if settings.speculate == "off":
        progress.speculation_settled("off")
        return None
    if model.why_no_speculation is not None:
        asked = settings.speculate != "auto"
        logger.log(
            logging.WARNING if asked else logging.INFO,
            "no speculation: %s",
            model.why_no_speculation,
        )
        progress.speculation_settled(f"none: {model.why_no_speculation}")
        return None
    drafts = None
    if settings.draft is not None:
        thread = stack.enter_context(TorchThread())
        drafts = await trio.to_thread.run_sync(DraftModel.load, settings.draft, model, thread)
    progress.speculation_settled(
        "prompt lookup" if drafts is None else f"prompt lookup, and {drafts.model.name} as a draft"
    )
    # In float32 rows differ by rounding, which is as much as any batch is allowed to do.
    is_rounded = model.is_rounded or settings.wire_dtype not in (None, "float32")
    needs_same_bits = settings.speculate == "auto" and is_rounded
    return Speculation(needs_same_bits=needs_same_bits, drafts=drafts)
