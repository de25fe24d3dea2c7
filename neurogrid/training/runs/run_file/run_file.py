"""A run file as a whole: all sections, what only fits together, and the text with every default filled in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final

from neurogrid.training.runs.run_file.checks_section import ChecksSection
from neurogrid.training.runs.run_file.epoch_sections import (
    MAX_EPOCH_MEMBERS,
    DistroSection,
    EpochsSection,
)
from neurogrid.training.runs.run_file.section import Section
from neurogrid.training.runs.run_file.sections import (
    CAUSAL_LM,
    CheckpointsSection,
    DataSection,
    EvalSection,
    InnerSection,
    MembersSection,
    ModelSection,
    OuterSection,
    StopSection,
    TrackSection,
)
from neurogrid.training.runs.run_file.stage_sections import AdapterSection, LayoutSection
from neurogrid.training.runs.run_file.values import Kind, pattern, text, whole, written

__all__ = ["SECTIONS", "RunFile"]

SECTIONS: Final[Mapping[str, type[Section]]] = {
    each.title: each
    for each in (
        *(ModelSection, LayoutSection, AdapterSection, DataSection, StopSection, InnerSection),
        *(OuterSection, DistroSection, EpochsSection, ChecksSection, MembersSection),
        *(CheckpointsSection, EvalSection, TrackSection),
    )
}
"""All sections by their titles, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class RunFile(Section):
    """A run file: what a training run is to do, with every default filled in.

    Attributes:
        name: of the run, and of its directory.
        preset: the one that its values were taken from; empty for none.
        seed: of random weights, of the order of the data, and of dropout.
        folder: that relative places in it begin at, the file's own; empty for where the process was started. It is not
            in the text, and two run files that differ in nothing else are equal.
    """

    name: str
    model: ModelSection
    data: DataSection
    stop: StopSection
    preset: str = ""
    seed: int = 0
    layout: LayoutSection = field(default_factory=LayoutSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    inner: InnerSection = field(default_factory=InnerSection)
    outer: OuterSection = field(default_factory=OuterSection)
    distro: DistroSection = field(default_factory=DistroSection)
    epochs: EpochsSection = field(default_factory=EpochsSection)
    checks: ChecksSection = field(default_factory=ChecksSection)
    members: MembersSection = field(default_factory=MembersSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    eval: EvalSection = field(default_factory=EvalSection)
    track: TrackSection = field(default_factory=TrackSection)
    folder: str = field(default="", compare=False)

    title: ClassVar[str] = ""
    keys: ClassVar[Mapping[str, Kind]] = {
        "name": pattern(
            "at most 64 letters, digits, -, _ and ., the first a letter or digit",
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        ),
        "preset": text("the name of a preset"),
        "seed": whole(0),
    }

    @property
    def is_chain(self) -> bool:
        """Whether members are stages, of one or several each, or learn an adapter; in one chain or several."""
        layout = self.layout
        return max(layout.stages, layout.stage_members, layout.replicas) > 1 or self.adapter.r > 0

    @property
    def rounds_are_steps(self) -> bool:
        """Whether a round is one step, of one chain."""
        return self.is_chain and self.layout.replicas == 1

    @property
    def is_witnessed(self) -> bool:
        """Whether witnesses say which results of a round are applied."""
        return self.outer.method == "distro"

    @property
    def num_batch_samples(self) -> int:
        """Samples of an inner step of each member."""
        if self.model.kind == CAUSAL_LM:
            return self.inner.batch_tokens // self.data.sequence_length
        return self.inner.batch_samples

    @property
    def steps_between_states(self) -> int:
        """Steps after which the leader of stages keeps their state: of replicas whole rounds."""
        steps = self.layout.steps_between_states(has_adapter=self.adapter.r > 0)
        every = self.outer.every if self.layout.replicas > 1 else 1
        return -(-steps // every) * every

    def place(self, told: str) -> Path:
        """The path of a place that the run file names; a `~` at its beginning is a home."""
        return Path(self.folder) / os.path.expanduser(told)

    def with_places(self, moved: Callable[[str], str], *, config: str, folder: str) -> RunFile:
        """The same for a file in another folder.

        Args:
            moved: gives what a path reads there; it is not asked for addresses.
            config: what [model] config reads there, which may be no path.
        """
        data, checkpoints = self.data, self.checkpoints
        path = data.path if not data.path or "://" in data.path else moved(data.path)
        mixture = tuple(replace(part, path=moved(part.path)) for part in data.mixture)
        tokenizer = data.tokenizer and moved(data.tokenizer)
        return replace(
            self,
            model=replace(self.model, config=config),
            data=replace(data, path=path, mixture=mixture, tokenizer=tokenizer),
            checkpoints=replace(checkpoints, dir=checkpoints.dir and moved(checkpoints.dir)),
            folder=folder,
        )

    def text(self) -> str:
        """The same as TOML, with all that was not given; `parse_run_file` gives an equal one."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _lines_of(self)
        for title in SECTIONS:
            yield from ("", f"[{title}]", *_lines_of(getattr(self, title)))

    def _check(self) -> None:
        if self.is_chain and self.model.kind != CAUSAL_LM:
            raise LayoutSection.fault(
                "stages", "and [adapter] are of language models", ModelSection.place_of("kind")
            )
        if self.is_chain and self.outer.freshness < 1:
            raise OuterSection.fault(
                "freshness",
                "is 1 with [layout] and [adapter]: what a replica is late with is dealt again",
                LayoutSection.place_of("stages"),
            )
        if self.layout.subspace and self.adapter.r:
            raise LayoutSection.fault(
                "subspace",
                "is for models whose own weights learn from the beginning: with an [adapter] they stay as they are",
                AdapterSection.place_of("r"),
            )
        if self.members.open and not self.checks.audit:
            raise MembersSection.fault(
                "open",
                "is for runs whose members compute again what strangers give: with [checks] audit above 0",
                ChecksSection.place_of("audit"),
            )
        if self.is_witnessed:
            self._check_witnessed()
        elif self.checks.audit:
            raise ChecksSection.fault(
                "audit",
                'is above 0 only with [outer] method "distro": elsewhere members claim nothing',
                OuterSection.place_of("method"),
            )
        if self.layout.replicas > 1:
            self._check_replicas()
        if self.model.kind == CAUSAL_LM:
            if not self.num_batch_samples:
                raise InnerSection.fault(
                    "batch_tokens",
                    f"is at least [data] sequence_length, {self.data.sequence_length}: a sample is never cut",
                    DataSection.place_of("sequence_length"),
                )
        elif self.stop.tokens is not None:
            raise StopSection.fault("tokens", "is of text: images have steps, rounds, or epochs")
        goals = [key for key in self.stop.keys if getattr(self.stop, key) is not None]
        if goals == ["hours"] and self.inner.schedule != "constant":
            raise StopSection.fault(
                "hours",
                f'alone says nothing of how many steps schedule "{self.inner.schedule}" has: give another end, too, or '
                'schedule "constant"',
            )
        if self.layout.replicas == 1 and self.layout.stages > self.members.max:
            raise LayoutSection.fault(
                "stages",
                f"is at most [members] max, {self.members.max}",
                MembersSection.place_of("max"),
            )
        if self.outer.quorum > self.members.max:
            raise OuterSection.fault(
                "quorum",
                f"is at most [members] max, {self.members.max}",
                MembersSection.place_of("max"),
            )

    def _check_witnessed(self) -> None:
        """Raises WrongValueError where witnesses would have to do what they cannot."""
        method = OuterSection.place_of("method")
        if self.is_chain:
            raise OuterSection.fault(
                "method",
                '"distro" is of members that hold the whole model: without [layout] and [adapter]',
                LayoutSection.place_of("stages"),
            )
        if self.members.max > MAX_EPOCH_MEMBERS:
            raise MembersSection.fault(
                "max", f'is at most {MAX_EPOCH_MEMBERS} with method "distro"', method
            )
        if 0 < self.epochs.batches < self.members.min:
            raise EpochsSection.fault(
                "batches",
                f"is 0, or at least [members] min, {self.members.min}: each member is to have one",
                MembersSection.place_of("min"),
            )

    def _check_replicas(self) -> None:
        """Raises WrongValueError where replicas would have to do what they cannot."""
        outer, replicas = self.outer, self.layout.replicas
        for key, value in (("method", "diloco"), ("way", "butterfly"), ("aggregator", "mean")):
            if getattr(outer, key) != value:
                raise OuterSection.fault(
                    key,
                    f'is "{value}" where [layout] replicas is above 1',
                    LayoutSection.place_of("replicas"),
                )
        if outer.codec.partition(":")[0] in ("sign", "topk"):
            raise OuterSection.fault(
                "codec",
                '"sign" and "topk" are not for [layout] replicas: "f16" is, or "int8"',
                LayoutSection.place_of("replicas"),
            )
        for section, key, least in (
            (OuterSection, "quorum", outer.quorum),
            (MembersSection, "min", self.members.min),
        ):
            if least > replicas:
                raise section.fault(
                    key,
                    f"is at most [layout] replicas, {replicas}",
                    LayoutSection.place_of("replicas"),
                )


def _lines_of(section: Section) -> Iterator[str]:
    for key, kind in section.keys.items():
        value = getattr(section, key)
        if value is None:
            yield f"# {key}: not given; {kind.says}"
        elif (key, value) != ("preset", ""):
            yield f"{key} = {written(value)}"
