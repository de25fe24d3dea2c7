"""A run for transformers' Trainer: a callback that syncs while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from neurogrid.errors import ConfigurationError
from neurogrid.training.loops.blocking import Run, join_run, open_run
from neurogrid.training.loops.meeting import LISTEN
from neurogrid.training.wire import GroupSettings

__all__ = ["NeuroGridCallback"]


class NeuroGridCallback(TrainerCallback):
    """Makes a Trainer a member of a run: `Trainer(..., callbacks=[NeuroGridCallback(ticket)])`.

    The Trainer steps its own optimiser; after every so many of its steps the weights are synced, and once more when it
    has ended, so all members are left with the same.

    A Trainer tells its callbacks nothing of an error that ends it. A program that goes on after one calls `close`, or
    trains in the block of `with callback:`; else the others wait for this member in each round.

    Args:
        where: a ticket, or an address on the same machine; None founds a run, and prints what others join it by.
        min_members: members that the first sync of a run that is founded waits for, in place of those of the settings.
        listen, timeout, settings: as `open_run`.

    Attributes:
        run: the member, while the Trainer trains.
    """

    def __init__(
        self,
        where: str | None = None,
        *,
        min_members: int | None = None,
        listen: Sequence[str] = LISTEN,
        timeout: float = 600.0,
        **settings: Any,
    ) -> None:
        told = [*settings, *(["min_members"] if min_members is not None else [])]
        if where is not None and told:
            raise ConfigurationError(
                f"{', '.join(told)} of a run are its founder's: join it without"
            )
        if min_members is not None:
            group = settings.get("settings") or GroupSettings()
            settings["settings"] = replace(group, min_members=min_members)
        self.run: Run | None = None
        self._where, self._settings = where, settings
        self._listen, self._timeout = listen, timeout
        self._open = ExitStack()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Found or join the run; the weights of one that is joined take the place of the model's.

        Raises:
            ConfigurationError: the Trainer is one of several processes, or loads other weights when it has ended.
        """
        assert model is not None
        if args.world_size > 1:
            raise ConfigurationError(
                f"the Trainer is one of {args.world_size} processes, and each would be a member by itself: train in "
                'one process on each machine, or as in docs/averaging.md under "With Accelerate"'
            )
        if args.load_best_model_at_end:
            raise ConfigurationError(
                "with load_best_model_at_end members would be left with weights of their own: leave it out"
            )
        self.close()
        if self._where is None:
            opened = open_run(model, listen=self._listen, timeout=self._timeout, **self._settings)
        else:
            opened = join_run(self._where, model, listen=self._listen, timeout=self._timeout)
        self.run = self._open.enter_context(opened)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the step, and sync if it is time."""
        if self.run is not None:
            self.run.step(samples=args.train_batch_size * args.gradient_accumulation_steps)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Sync what was learned since the last time, and leave the run."""
        # Also where the last sync fails: nobody is to wait for a member that learns no more.
        with self:
            if self.run is not None and self.run.num_steps % self.run.rules.every:
                self.run.sync()

    def close(self) -> None:
        """Leave the run without a last sync, if this is a member of one. Again: nothing happens."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.run = None
        self._open.__exit__(kind, error, traceback)
