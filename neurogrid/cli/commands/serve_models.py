"""Several models behind one port: each opened as one alone is, with a host and a peer id of its own.

The first has what the options say: port, identity, the ticket by which workers join. The others take a free port and an
identity beside the first one's, and find the workers that the first one knows.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from neurogrid.cli.commands.serve import ServingOptions, open_server
from neurogrid.cli.options.common import Listening, listening
from neurogrid.cli.options.model import adapters_of, find_model, with_adapters
from neurogrid.cli.options.trust import Trust, existing_trust, trust_of
from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import parse_name
from neurogrid.inference.residency import MAX_MODELS

if TYPE_CHECKING:
    from neurogrid.assembly.coordinator_settings import CoordinatorSettings
    from neurogrid.assembly.memory_sharing import MemorySharing
    from neurogrid.cli.commands.follow import ServedRun
    from neurogrid.cli.commands.serve import Server
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.cli.terminal.show import JoinLine
    from neurogrid.inference.board.progress import Progress
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.inference.generation.loaded_model import LoadedModel
    from neurogrid.server.additions import AddedModel, Additions
    from neurogrid.server.models import Models, ServedModel

__all__ = ["ModelOptions", "each_model", "find_models", "has_several", "name_of", "serve_models"]

logger = logging.getLogger(__name__)

MakeSettings = Callable[[argparse.Namespace, Listening, Trust], "CoordinatorSettings"]
OpenShown = Callable[
    [AsyncExitStack, AbstractAsyncContextManager["Server"], "Models"],
    Awaitable[tuple["Server", "JoinLine"]],
]
Judge = Callable[[argparse.Namespace], object]

_PORT: Final = re.compile(r"(?<=/(?:tcp|udp)/)\d+")
# What is for one model, and would be a guess for several.
_OF_ONE: Final = (("draft", "--draft"), ("follow", "--follow"))


def has_several(options: argparse.Namespace) -> bool:
    """Whether more than one model is served, or may be."""
    return bool(options.with_model or options.model_root)


def each_model(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each model, the first first: those of all, but for what is the first one's.

    Raises:
        ConfigurationError: an option is for one model, and there are more.
    """
    for name, flag in _OF_ONE:
        if getattr(options, name):
            raise ConfigurationError(f"{flag} is for one model: serve it by itself")
    if len(options.with_model) >= MAX_MODELS:
        raise ConfigurationError(f"one server has {MAX_MODELS} models at most")
    found = [options]
    for name, place in options.with_model:
        own = copy.copy(options)
        own.model, own.model_name, own.adapter = place, name, []
        found.append(own)
    return found


async def find_models(
    each: list[argparse.Namespace], screen: Screen, judge: Callable[[], object]
) -> None:
    """Have every model on this machine.

    Raises:
        ConfigurationError: one cannot be had, or two have one name.
    """
    names = set(adapters_of(each[0]))
    for options in each:
        await find_model(options, screen, judge)
        name = name_of(options)
        if name in names:
            raise ConfigurationError(
                f"two models, or a model and an adapter, are called {name!r}: NAME=MODEL gives one of them another name"
            )
        names.add(name)


def name_of(options: argparse.Namespace) -> str:
    """Name of a model that was found."""
    from neurogrid.model.embedded import embedded_model_path
    from neurogrid.model.files.checkpoint_files import model_name_of

    return options.model_name or model_name_of(options.model or embedded_model_path())


@dataclass
class ModelOptions:
    """One model, as it is opened.

    Attributes:
        options: its own; without the adapters that clients have removed.
        loaded: what was read of it before it is opened the first time.
        named: what the client named that added it, by which it is found again; empty for one of the start.
        kept: what it was when it was added, before this start; None where nobody has to look for it again.
    """

    options: argparse.Namespace
    loaded: LoadedModel | None = None
    named: str = ""
    kept: AddedModel | None = None

    def keep_adapters(self, names: Collection[str]) -> None:
        """Open it with these adapters of its options, and with no others, from now on."""
        self.options = with_adapters(self.options, names)


class _Opener:
    """Opens models, and finds those that clients add."""

    def __init__(
        self,
        first: argparse.Namespace,
        models: Models,
        sharing: MemorySharing,
        *,
        root: Path | None,
        additions: Additions,
        restore: Callable[[Coordinator], Awaitable[None]],
        make_settings: MakeSettings,
        judge: Judge,
        progress: Callable[[], Progress],
    ) -> None:
        self.places: dict[str, ModelOptions] = {}
        self.where = Listening(())
        self.trust = Trust()
        self.first_progress: JoinLine | None = None
        self._first = first
        self._first_name = ""
        self._models = models
        self._sharing = sharing
        self._root = root
        self._additions = additions
        self._restore = restore
        self._make_settings = make_settings
        self._judge = judge
        self._progress = progress
        self._open: dict[str, Coordinator] = {}

    # ModelPlaces

    async def find(self, place: str, name: str | None) -> str:
        from neurogrid.inference.generation.adapters import AdapterName

        path = await trio.to_thread.run_sync(self._place_of, place)
        own = copy.copy(self._first)
        own.model, own.model_name, own.adapter = path, name, []
        found = name_of(own)
        if AdapterName.fullmatch(found) is None:
            raise ConfigurationError(
                f"{found[:100]!r} is no name for a model: letters, digits and ._:/@+- make one, 128 at most"
            )
        if found in self.places:
            raise ConfigurationError(f"the name {found!r} is taken: give the model another")
        await trio.to_thread.run_sync(self._judge, own)
        own.model_name = found
        self.places[found] = ModelOptions(own, named=place)
        return found

    async def keep(self, name: str) -> None:
        from neurogrid.server.additions import AddedModel, model_state

        place = self.places[name]
        state = await trio.to_thread.run_sync(model_state, place.options.model)
        await self._additions.keep_model(name, AddedModel(place.named, state))

    async def drop(self, name: str) -> None:
        await self._additions.forget_model(name)

    def forget(self, name: str) -> None:
        self.places.pop(name, None)
        self._sharing.forget(name)

    @property
    def held_bytes(self) -> int:
        return sum(sum(by_peer.values()) for by_peer in self._sharing.held().values())

    def _place_of(self, place: str) -> Path:
        from neurogrid.hub.cache import cached_snapshot

        assert self._root is not None
        root = self._root.resolve()
        path = (root / place).resolve()
        if path.is_relative_to(root) and path.exists():
            return path
        named = parse_name(place)
        snapshot = cached_snapshot(named) if named is not None else None
        if snapshot is None:
            # The same, so that nobody learns what else there is on this machine.
            raise ConfigurationError(
                f"there is no model {place[:200]!r} below --model-root, nor whole in the cache of the hub"
            )
        return snapshot

    async def _find_again(self, place: ModelOptions, kept: AddedModel) -> None:
        """Look whether a model is what it was when a client added it, before this start.

        Raises:
            ConfigurationError: it is gone, or something else.
        """
        from neurogrid.server.additions import model_state

        def find() -> Path:
            path = self._place_of(kept.place)
            if model_state(path) != kept.state:
                raise ConfigurationError(
                    f"the files in {path} are not those that were added: DELETE and POST /v1/models take them as they "
                    "are now"
                )
            return path

        place.options.model = await trio.to_thread.run_sync(find)
        await trio.to_thread.run_sync(self._judge, place.options)
        place.kept = None

    # ModelOpener

    async def expect_all(self) -> None:
        """Read what all models of the start take, before any of them is planned. Those that clients had added get what
        is left, as they did then.

        Raises:
            ConfigurationError, ModelError: one cannot be read.
        """
        from neurogrid.assembly.memory_sharing import demand_of
        from neurogrid.assembly.planned_fleet import load_model

        for place in self.places.values():
            if place.kept is not None:
                continue
            settings = self._make_settings(place.options, self.where, self.trust)
            place.loaded = await load_model(settings)
            self._sharing.expect(demand_of(place.loaded, settings, asked=0.0))

    @asynccontextmanager
    async def open(self, model: ServedModel) -> AsyncIterator[Coordinator]:
        from neurogrid.assembly.coordinator import open_coordinator
        from neurogrid.assembly.memory_sharing import demand_of
        from neurogrid.assembly.planned_fleet import load_model

        name, place = model.name, self.places[model.name]
        if place.kept is not None:
            await self._find_again(place, place.kept)
        place.keep_adapters(model.adapters)  # some may have been removed while it was not open
        self._first_name = self._first_name or name
        is_first = name == self._first_name
        settings = self._settings(place.options, model, is_first=is_first)
        loaded, place.loaded = place.loaded or await load_model(settings), None
        demand = demand_of(loaded, settings, asked=model.count(trio.current_time()))
        progress = self.first_progress if is_first and self.first_progress else self._progress()
        try:
            async with open_coordinator(
                settings,
                model=loaded,
                progress=progress,
                board=model.board,
                share=self._sharing.share(demand),
            ) as coordinator:
                del loaded
                self._open[name] = coordinator
                given = tuple(coordinator.adapters)
                if is_first and self.first_progress is not None:
                    # Those who may join have been told.
                    known = replace(self.trust, is_new=False, ticket_file=None)
                    self.first_progress.invite = known.invite if known.cluster else None
                try:
                    await self._restore(coordinator)
                    yield coordinator
                finally:
                    del self._open[name]
                    served = coordinator.adapters
                    place.keep_adapters([each.name for each in given if each in served])
        finally:
            self._sharing.forget(name)

    def _settings(
        self, options: argparse.Namespace, model: ServedModel, *, is_first: bool
    ) -> CoordinatorSettings:
        where = self.where if is_first else listening_beside(options)
        trust = self.trust if is_first else trust_beside(options, self.trust, model.name)
        settings = self._make_settings(options, where, trust)
        return replace(
            settings,
            model_name=model.name,
            bootstrap=tuple(dict.fromkeys((*settings.bootstrap, *self._known_workers()))),
        )

    def _known_workers(self) -> list[str]:
        """Addresses of the workers that the open models have."""
        return [
            address
            for coordinator in self._open.values()
            for worker in coordinator.workers
            if worker.peer_id != coordinator.peer_id
            for address in coordinator.host.addresses_of(worker.peer_id)
        ]


def listening_beside(options: argparse.Namespace) -> Listening:
    """Addresses that a further host of this process listens on: the same, on free ports."""
    if options.listen:
        return Listening(tuple(_PORT.sub("0", address) for address in options.listen))
    own = copy.copy(options)
    own.port = None
    return Listening(listening(own, port_flag="--p2p-port").fallback)


def trust_beside(options: argparse.Namespace, trust: Trust, name: str) -> Trust:
    """The trust of a further coordinator of this process: the same peers are admitted; its key is another.

    The key is kept beside the first one's, if that is kept, so that it is the same the next time.
    """
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust import COORDINATOR, WORKER, ClusterAdmission

    file = trust.identity_file
    if file is not None:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:40]
        file = file.with_name(f"{file.stem}-{slug}-{digest}{file.suffix}")
    if trust.cluster is None:
        own = copy.copy(options)
        own.identity = file
        return trust_of(own, is_worker=False)
    assert file is not None
    membership = trust.cluster.enrol(Identity.load(file).peer_id, COORDINATOR)
    admission = ClusterAdmission(membership, admits={WORKER}, issuer=trust.cluster)
    return Trust(admission, file)


async def serve_models(
    each: list[argparse.Namespace],
    runs: list[ServedRun | None],
    serving: ServingOptions,
    additions: Additions,
    where: Listening,
    screen: Screen,
    farewells: list[Callable[[], Awaitable[None]]],
    *,
    make_settings: MakeSettings,
    judge: Judge,
    open_shown: OpenShown,
    progress: Callable[[], Progress],
) -> None:
    """Serve several models until cancelled.

    Args:
        each: the options of each, found.
        runs: of each the training run whose newest checkpoint is served, until the end; None for one of no run.
        additions: what clients had added, which is served, too.
        where: the first one listens.
        make_settings: gives the settings of one.
        judge: refuses a model that is none.
        open_shown: opens a server and shows it; gives it, and what says how workers join.
        progress: gives what says how a further model gets on.

    Raises:
        NeuroGridError: one of them cannot be opened.
    """
    from neurogrid.assembly.memory_sharing import MemorySharing
    from neurogrid.inference.residency import ResidencyLimits
    from neurogrid.server.model_keeper import ModelKeeper
    from neurogrid.server.models import Models

    first = each[0]
    gives_way = first.idle_after < float("inf")
    models = Models(ResidencyLimits(idle_after=first.idle_after))
    sharing = MemorySharing(gives_way=gives_way)
    names = {name_of(options): ModelOptions(options) for options in each}
    for name in names:
        models.add(name, is_wanted=True)
    added = _add_kept(models, additions, first) if serving.model_root is not None else {}
    _tell_adapters(models, each, additions if serving.adapter_root is not None else None)

    async def restore(coordinator: Coordinator) -> None:
        await server.restore(coordinator)

    opener = _Opener(
        first,
        models,
        sharing,
        root=serving.model_root,
        additions=additions,
        restore=restore,
        make_settings=make_settings,
        judge=judge,
        progress=progress,
    )
    opener.where = where
    opener.places = {**names, **added}
    places = opener if serving.model_root is not None else None
    async with AsyncExitStack() as stack:
        opening = open_server(serving, additions, models, places)
        server, shown = await open_shown(stack, opening, models)
        trust = existing_trust(first)
        held = stack.enter_context(ExitStack())
        if trust is not None:
            held.enter_context(trust.held())
            opener.trust = trust
        for options, run in zip(each, runs, strict=True):
            if run is not None:
                options.model = held.enter_context(run.take())
        await opener.expect_all()
        if trust is None:
            # Now that nothing else is known to be wrong.
            trust = trust_of(first, is_worker=False)
            held.enter_context(trust.held())
            opener.trust = trust
        if trust.cluster is not None:
            shown.invite = trust.invite
        opener.first_progress = shown

        def begun() -> None:
            farewells.append(server.finish)
            screen.print(server.url)

        keeper = ModelKeeper(models, opener, server.metrics, gives_way=gives_way, added=added)
        await keeper.run(on_begun=begun)


def _tell_adapters(
    models: Models, each: list[argparse.Namespace], additions: Additions | None
) -> None:
    """Have a model known by its adapters, too, before it was ever open: one that stands by is opened for them.

    Args:
        each: the options of each model of the start.
        additions: what clients had added; None where no adapters of theirs are served.
    """
    named = {name_of(options): adapters_of(options) for options in each}
    for model in models.all():
        added = additions.adapters_of(model.name) if additions is not None else {}
        model.kept_adapters = {
            **named.get(model.name, {}),
            **{name: Path(adapter.path) for name, adapter in added.items()},
        }


def _add_kept(
    models: Models, additions: Additions, first: argparse.Namespace
) -> dict[str, ModelOptions]:
    """Models that clients had added, to be found when they are opened; of those that cannot be, a line each."""
    from neurogrid.server.errors import APIError

    added = {}
    for name, kept in additions.models.items():
        try:
            if name in adapters_of(first):
                raise ConfigurationError(f"--adapter {name} has its name")
            models.add(name, is_wanted=True)
        except (APIError, ConfigurationError) as exc:
            logger.warning("the model %s, which a client had added, is not served: %s", name, exc)
            continue
        own = copy.copy(first)
        own.model, own.model_name, own.adapter = None, name, []
        added[name] = ModelOptions(own, named=kept.place, kept=kept)
    return added
