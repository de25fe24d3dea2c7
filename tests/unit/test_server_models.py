"""Several models behind one port: which of them answers, what is told of each, and what becomes of those that fail."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from prometheus_client import generate_latest
from trio.testing import MockClock

from neurogrid.errors import CapacityError, ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.residency import MAX_MODELS, ResidencyLimits
from neurogrid.model.embedded import embedded_model_path
from neurogrid.server.app import make_app
from neurogrid.server.cluster.routes import cluster_routes
from neurogrid.server.health import health_routes
from neurogrid.server.model_keeper import ModelKeeper
from neurogrid.server.models import MAX_WAIT, Models, ServedModel
from neurogrid.server.ollama.routes import ollama_routes
from neurogrid.server.openai.adapter_routes import adapter_routes
from neurogrid.server.openai.routes import openai_routes
from neurogrid.telemetry.coordinator_metrics import CoordinatorMetrics
from tests.unit.asgi_client import Answered, ask
from tests.unit.test_server_openai import save_embedded_adapter
from tests.unit.told_coordinator import Told, load_embedded

LIMITS = ResidencyLimits(idle_after=60.0, min_ready=10.0)


@dataclass
class World:
    """Opens what it is told to, as long as there is room for so many.

    Attributes:
        broken: names of models that cannot be opened.
        opened: names, in the order in which they were.
        kept: names that are to be found again at the next start.
        places: names that are taken, of models that are there.
        loaded: other models than the embedded one, by name.
        needed: bytes that one needs for which there is no room; each that is open holds one, and one is left.
    """

    room: int = 9
    broken: dict[str, NeuroGridError] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    open_now: dict[str, Told] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    text: dict[str, str] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    needed: int = 2

    @property
    def held_bytes(self) -> int:
        return len(self.open_now)

    @asynccontextmanager
    async def open(self, model: ServedModel) -> AsyncIterator[Any]:
        name = model.name
        await trio.sleep(1.0)
        if name in self.broken:
            raise self.broken[name]
        if len(self.open_now) >= self.room:
            needed = self.needed
            raise CapacityError(
                f"{name} needs {needed} B, and 1 B is left", needed=needed, available=1
            )
        loaded = replace(self.loaded.get(name) or load_embedded(), name=name)
        told = Told(loaded, text=self.text.get(name, f" says {name}."))
        self.opened.append(name)
        self.open_now[name] = told
        try:
            yield told
        finally:
            del self.open_now[name]

    def forget(self, name: str) -> None:
        self.forgotten.append(name)
        self.places.discard(name)

    async def find(self, place: str, name: str | None) -> str:
        if place.startswith("no"):
            raise ConfigurationError(f"there is no model {place!r}")
        found = name or place
        if found in self.places:
            raise ConfigurationError(f"the name {found!r} is taken")
        self.places.add(found)
        return found

    async def keep(self, name: str) -> None:
        if name == "unkept":
            raise ConfigurationError("cannot write the file: No space left on device")
        self.kept.add(name)

    async def drop(self, name: str) -> None:
        self.kept.discard(name)


@dataclass
class Served:
    models: Models
    world: World
    metrics: CoordinatorMetrics
    app: Any

    async def post(self, path: str, **body: Any) -> Answered:
        return await ask(self.app, "POST", path, json_body=body)

    async def get(self, path: str) -> Answered:
        return await ask(self.app, "GET", path)

    async def says(self, model: str | None = None, **more: Any) -> Answered:
        named = {} if model is None else {"model": model}
        return await self.post("/v1/completions", prompt="A", max_tokens=5, **named, **more)

    async def states(self) -> dict[str, str]:
        data = (await self.get("/v1/models")).json["data"]
        return {each["id"]: each["state"] for each in data}


async def serve(
    world: World,
    names: tuple[str, ...],
    use: Callable[[Served], Awaitable[None]],
    *,
    limits: ResidencyLimits = LIMITS,
    adds: bool = True,
    added: tuple[str, ...] = (),
) -> None:
    """Have models of these names served while `use` runs, and those that clients had added."""
    models = Models(limits)
    for name in (*names, *added):
        models.add(name, is_wanted=True)
        world.places.add(name)
    metrics = CoordinatorMetrics(models=models.all)
    app = make_app(
        [
            *openai_routes(
                models, request_timeout=500.0, models=models, places=world if adds else None
            ),
            *adapter_routes(models, None),
            *ollama_routes(models, request_timeout=500.0),
            *cluster_routes(models=models),
        ],
        open_routes=health_routes(models),
    )
    gives_way = limits.idle_after < float("inf")
    keeper = ModelKeeper(models, world, metrics, gives_way=gives_way, added=added)
    begun = trio.Event()
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(keeper.run, on_begun=begun.set))
            await begun.wait()
            await use(Served(models, world, metrics, app))
            nursery.cancel_scope.cancel()


async def test_a_request_is_answered_by_the_model_that_it_names(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        for name in ("a", "b"):
            answer = (await served.says(name)).json
            assert answer["model"] == name
            assert answer["choices"][0]["text"].startswith(f" says {name}")
        assert (await served.says()).json["model"] == "a"
        missing = await served.says("c")
        assert missing.status == 404
        assert missing.error["code"] == "model_not_found"
        assert "'a' and 'b' are" in missing.error["message"]
        tokens = await served.post("/tokenize", model="b", prompt="A")
        assert tokens.json["count"]
        for body in ({"model": "b"}, {"model": "b:latest"}):
            generated = await served.post(
                "/api/generate", prompt="A", raw=True, stream=False, **body
            )
            assert generated.json["response"].startswith(" says b")
        shown = await served.post("/api/show", model="b:latest")
        assert shown.json["model_info"]["general.basename"] == "b"
        assert await served.states() == {"a": "ready", "b": "ready"}
        for path in ("/api/tags", "/api/ps"):
            names = [each["name"] for each in (await served.get(path)).json["models"]]
            assert names == ["a:latest", "b:latest"]
        assert (await served.get("/v1/models/b")).json["id"] == "b"
        assert (await served.get("/v1/models/c")).status == 404
        info = (await served.get("/v1/cluster/info")).json
        assert info["models"] == [{"id": name, "state": "ready"} for name in ("a", "b")]

    await serve(World(), ("a", "b"), use)


async def test_one_that_fails_at_the_start_ends_it(autojump_clock: MockClock) -> None:
    world = World(broken={"b": ConfigurationError("b is broken")})
    with pytest.raises(ConfigurationError, match="b is broken"):
        await serve(world, ("a", "b"), lambda served: trio.sleep_forever())


async def test_without_ways_to_give_way_all_have_to_fit(autojump_clock: MockClock) -> None:
    limits = ResidencyLimits(idle_after=float("inf"))
    with pytest.raises(CapacityError, match="b needs 2 B"):
        await serve(World(room=1), ("a", "b"), lambda served: trio.sleep_forever(), limits=limits)


@pytest.mark.parametrize("idle_after", [60.0, float("inf")])
async def test_one_that_was_added_before_ends_no_start(
    autojump_clock: MockClock, idle_after: float
) -> None:
    async def use(served: Served) -> None:
        assert (await served.get("/ready")).status == 200
        states = await served.states()
        assert states["b"] == "failed"
        assert (states["a"], states["c"]) == ("ready", "ready")
        assert states["d"] == "idle"
        assert "is gone" in (await served.get("/v1/models/b")).json["reason"]
        assert (await served.says("b")).status == 503
        assert (await ask(served.app, "DELETE", "/v1/models/b")).status == 200
        assert (await served.says("b")).status == 404

    world = World(room=2, broken={"b": ConfigurationError("its folder is gone")})
    limits = replace(LIMITS, idle_after=idle_after)
    await serve(world, ("a",), use, added=("b", "c", "d"), limits=limits)


async def test_an_idle_one_gives_way_and_comes_back(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        assert await served.states() == {"a": "ready", "b": "idle"}
        assert (await served.get("/ready")).status == 200
        entry = (await served.get("/v1/models/b")).json
        assert "b needs 2 B" in entry["reason"]
        began = trio.current_time()
        assert (await served.says("b")).json["model"] == "b"
        assert LIMITS.idle_after - 5 < trio.current_time() - began < LIMITS.idle_after + 10
        assert await served.states() == {"a": "idle", "b": "ready"}
        # What it was is still told.
        tags = (await served.get("/api/tags")).json["models"]
        assert [each["name"] for each in tags] == ["a:latest", "b:latest"]
        assert [each["name"] for each in (await served.get("/api/ps")).json["models"]] == [
            "b:latest"
        ]
        assert (await served.says("a")).json["model"] == "a"
        assert served.world.opened == ["a", "b", "a"]
        assert await served.states() == {"a": "ready", "b": "idle"}

    await serve(World(room=1), ("a", "b"), use)


async def test_none_gives_way_where_that_would_not_be_enough(autojump_clock: MockClock) -> None:
    """As where another coordinator has the workers' memory."""

    async def use(served: Served) -> None:
        assert await served.states() == {"a": "ready", "b": "failed"}
        for _ in range(3):
            await trio.sleep(LIMITS.idle_after)
            answer = await served.says("b")
            assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
            assert "b needs 5 B" in answer.error["message"]
            assert await served.states() == {"a": "ready", "b": "failed"}
        assert served.world.opened == ["a"]
        refused = await served.post("/v1/models", model="c")
        assert (refused.status, refused.error["code"]) == (400, "model_refused")
        served.world.room = 2
        await trio.sleep(LIMITS.retry_after)
        assert (await served.says("b")).status == 200

    await serve(World(room=1, needed=5), ("a", "b"), use)


async def test_one_whose_files_are_gone_is_served_and_takes_no_other_along(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    place = tmp_path / "b"
    shutil.copytree(embedded_model_path(), place)
    loaded = LoadedModel.load(place, name="b", max_seq_len=128, dtype="float32")

    async def use(served: Served) -> None:
        assert (await served.says("b")).status == 200
        for size_is_known in (True, False):
            for path in ("/api/tags", "/api/ps"):
                answer = await served.get(path)
                assert answer.status == 200
                sizes = {each["name"]: each["size"] for each in answer.json["models"]}
                assert sizes["a:latest"]
                assert bool(sizes["b:latest"]) is size_is_known
            shutil.rmtree(place, ignore_errors=True)
        assert (await served.post("/api/show", model="b")).status == 200
        assert (await served.says("b")).status == 200
        assert (await ask(served.app, "DELETE", "/v1/models/b")).status == 200
        assert (await served.says("a")).status == 200
        assert await served.states() == {"a": "ready"}

    await serve(World(loaded={"b": loaded}), ("a", "b"), use)


async def test_who_waits_too_long_is_told_to_come_again(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        served.world.open_now["a"].waits = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.says, "a")
            await trio.sleep(0.1)
            began = trio.current_time()
            answer = await served.says("b")
            assert answer.status == 503
            assert answer.error["code"] == "model_not_ready"
            assert "b needs 2 B" in answer.error["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert trio.current_time() - began == pytest.approx(MAX_WAIT)
            assert await served.states() == {"a": "ready", "b": "idle"}
            nursery.cancel_scope.cancel()

    await serve(World(room=1), ("a", "b"), use)


async def test_models_come_and_go(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        added = await served.post("/v1/models", model="c")
        assert (added.status, added.json["id"], added.json["state"]) == (200, "c", "ready")
        assert served.world.kept == {"c"}
        unkept = await served.post("/v1/models", model="unkept")
        assert (unkept.status, unkept.error["code"]) == (500, "not_kept")
        await trio.sleep(1.0)
        assert "unkept" not in await served.states()
        assert (await served.says("c")).json["model"] == "c"
        again = await served.post("/v1/models", model="elsewhere", name="c")
        assert (again.status, again.error["code"]) == (400, "model_refused")
        served.world.open_now["c"].waits = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.says, "c")
            await trio.sleep(0.1)
            removed = trio.Event()

            async def remove() -> None:
                answer = await ask(served.app, "DELETE", "/v1/models/c")
                assert answer.json == {"id": "c", "object": "model", "deleted": True}
                removed.set()

            nursery.start_soon(remove)
            await trio.sleep(5.0)
            assert not served.world.kept
            assert not removed.is_set()  # somebody is being answered by it
            assert "c" in served.world.open_now
            assert (await served.says("c")).status == 404
            assert (await served.says("a")).status == 200
            nursery.cancel_scope.cancel()
        assert (await ask(served.app, "DELETE", "/v1/models/c")).status == 404
        await trio.sleep(1.0)
        assert "c" not in served.world.open_now
        assert served.world.forgotten == ["unkept", "c"]
        assert (await served.post("/v1/models", model="c")).status == 200

    await serve(World(), ("a", "b"), use)


async def test_one_that_ended_with_an_error_comes_back_for_who_asks_for_its_adapter(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    fails = trio.Event()

    class Failing(World):
        @asynccontextmanager
        async def open(self, model: ServedModel) -> AsyncIterator[Any]:
            async def fail() -> None:
                await fails.wait()
                raise CapacityError("its worker has no memory any more", needed=2, available=1)

            async with super().open(model) as told:
                told.adapters.add(told.adapters.read("poems", tmp_path / "poems"))
                if fails.is_set():  # by now
                    yield told
                    return
                with unwrap_errors():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(fail)
                        yield told

    async def use(served: Served) -> None:
        assert (await served.says("poems")).status == 200
        fails.set()
        await trio.sleep(0.1)
        assert await served.states() == {"a": "failed", "poems": "failed"}
        await trio.sleep(LIMITS.retry_after)
        assert (await served.says("poems")).status == 200
        assert served.world.opened == ["a", "a"]

    save_embedded_adapter(load_embedded(), tmp_path / "poems")
    await serve(Failing(), ("a",), use)


async def test_one_that_cannot_be_added_leaves_the_others_alone(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        missing = await served.post("/v1/models", model="nowhere")
        assert (missing.status, missing.error["code"]) == (400, "model_refused")
        served.world.broken["c"] = ConfigurationError("its weights are truncated")
        broken = await served.post("/v1/models", model="c")
        assert (broken.status, broken.error["code"]) == (400, "model_refused")
        assert "its weights are truncated" in broken.error["message"]
        assert await served.states() == {"a": "ready", "b": "ready"}
        assert (await served.says("b")).status == 200
        served.world.broken.clear()
        assert (await served.post("/v1/models", model="c")).status == 200
        for number in range(MAX_MODELS - 3):
            served.models.add(f"more{number}", is_wanted=False)
        refused = await served.post("/v1/models", model="d")
        assert refused.status == 400
        assert f"{MAX_MODELS} models are served already" in refused.error["message"]
        assert (await ask(served.app, "DELETE", "/v1/models/c")).status == 200
        assert (await served.post("/v1/models", model="d")).status == 200

    await serve(World(), ("a", "b"), use)


async def test_none_comes_or_goes_where_nobody_allowed_it(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        for method, path in (("POST", "/v1/models"), ("DELETE", "/v1/models/a")):
            answer = await ask(served.app, method, path, json_body={"model": "c"})
            assert (answer.status, answer.error["code"]) == (403, "models_fixed")

    await serve(World(), ("a",), use, adds=False)


async def test_the_last_one_may_go(autojump_clock: MockClock) -> None:
    async def use(served: Served) -> None:
        assert (await ask(served.app, "DELETE", "/v1/models/a")).status == 200
        assert (await served.says()).status == 404
        assert (await served.get("/ready")).status == 503
        assert (await served.post("/v1/models", model="b")).status == 200
        assert (await served.says()).json["model"] == "b"

    await serve(World(), ("a",), use)


async def test_metrics_are_of_all_and_of_each(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(served: Served) -> None:
        for model in served.models.all():
            model.board.generation_queued(1, 7)
            model.board.generation_opened(1)
            model.board.token_generated(1)
            model.board.generation_finished(1, "stop")
            model.board.generation_ended(1, "")
        for told in served.world.open_now.values():
            told.cache_bytes = (1, 2)  # type: ignore[attr-defined]
            peers = ("both", f"own {id(told)}")
            monkeypatch.setattr(told, "host", SimpleNamespace(connected_peers=peers), raising=False)
        text = generate_latest(served.metrics.registry).decode()
        for line in (
            'neurogrid_requests_total{outcome="stop"} 2.0',
            "neurogrid_prompt_tokens_total 14.0",
            "neurogrid_time_to_first_token_seconds_count 2.0",
            "neurogrid_kv_cache_limit_bytes 4.0",
            "neurogrid_p2p_connected_peers 3.0",
            'neurogrid_model_state{model="a",state="ready"} 1.0',
            'neurogrid_model_generated_tokens_total{model="b"} 1.0',
        ):
            assert line in text

    await serve(World(), ("a", "b"), use)
