"""Numbers of workers, stages and layers of its own that a coordinator is asked for, checked without torch, so that what
cannot come true is told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from neurogrid.errors import ConfigurationError

__all__ = ["LocalLayers", "PlanRequest"]

LocalLayers: TypeAlias = Literal["auto", "none"] | int
"""`none`; so many layers, at least 1; `auto` for as many as are needed."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The numbers that a plan has to keep to.

    Attributes:
        num_named: workers to dial.
        local_workers: workers to start on this machine.
        is_looking: whether workers can be found that nobody named.
        min_peers: workers to wait for; None for as many as are named and started, or one that is found.
        local_layers: layers that the coordinator computes itself.
        stages: None for the fewest that fit, or one for each local worker.
    """

    num_named: int
    local_workers: int
    is_looking: bool
    min_peers: int | None
    local_layers: LocalLayers
    stages: int | None

    @property
    def num_awaited(self) -> int:
        """Workers to wait for."""
        if self.min_peers is not None:
            return self.min_peers
        return self.num_named + self.local_workers or int(self.is_looking)

    @property
    def num_stages(self) -> int | None:
        """Stages to make; None for the fewest that fit."""
        return self.stages or (self.local_workers + self._has_own if self.local_workers else None)

    @property
    def _has_own(self) -> bool:
        return isinstance(self.local_layers, int)

    def check_workers(self) -> None:
        """Refuse what cannot come true however long one waits.

        Raises:
            ConfigurationError: there is nobody to compute, or there are more stages than workers.
        """
        num_awaited = self.num_awaited
        can_be_alone = self._has_own or (self.min_peers == 0 and self.local_layers == "auto")
        if num_awaited < 1 and not can_be_alone:
            raise ConfigurationError(
                "there is no worker to run on: name some with --peer, start some here with "
                "--local-workers, wait for some to be found or to dial in with --min-peers, or compute here "
                "alone with --min-peers 0"
            )
        if self.stages is not None and self.stages > num_awaited + self._has_own:
            raise ConfigurationError(
                f"--stages {self.stages} takes as many workers, and {num_awaited} will be waited "
                f"for: name more with --peer, or say --min-peers {self.stages}"
            )

    def check_layers(self, num_layers: int, model_name: str) -> None:
        """Refuse what a model has too few layers for.

        Raises:
            ConfigurationError: there are more stages, or layers of the coordinator's own, than the model has layers.
        """
        if self.num_stages is not None and self.num_stages > num_layers:
            raise ConfigurationError(
                f"{self.num_stages} stages (--stages, or one for each local worker) are more than the "
                f"{num_layers} layers of {model_name}: ask for at most {num_layers}"
            )
        if isinstance(self.local_layers, int) and not 1 <= self.local_layers <= num_layers:
            raise ConfigurationError(
                f"--local-layers {self.local_layers}: {model_name} has {num_layers} layers"
            )
