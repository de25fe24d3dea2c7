"""`/v1/adapters`: adapters that come and go while the server runs, for clients with a key; and come back with it.

Of the machine's files a client reaches those below one directory, which its owner names, and no others. What is being
generated is not disturbed: sessions go on with the adapter that they have.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from neurogrid.assembly.adapter_places import adapter_directory
from neurogrid.errors import ConfigurationError, ModelError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.server.additions import AddedAdapter, Additions
from neurogrid.server.backend import Backends
from neurogrid.server.errors import APIError, keeping
from neurogrid.server.http.body import read_json
from neurogrid.server.openai.model_list import describe_adapter
from neurogrid.server.openai.request_reader import read_model_name
from neurogrid.server.openai.request_schemas import ADAPTER_REQUEST
from neurogrid.server.schema_check import check

__all__ = ["adapter_routes", "restore_adapters"]

logger = logging.getLogger(__name__)

# Each is read into memory, and hashed.
MAX_READ_AT_ONCE = 2


def adapter_routes(
    backends: Backends, root: Path | None, additions: Additions | None = None
) -> list[BaseRoute]:
    """The routes.

    Args:
        root: the directory below which adapters are; None where none are added.
        additions: where those are kept that come and go; None for no longer than the server runs.
    """
    reading = trio.CapacityLimiter(MAX_READ_AT_ONCE)
    changing = trio.Lock()
    kept = additions or Additions()

    async def add(request: Request) -> Response:
        below = _require_root(root)
        backends.require_one()
        body = await read_json(request)
        check(body, ADAPTER_REQUEST)
        backend = backends.choose(body.get("model"))
        await backend.wake()
        with backend.request() as coordinator:
            name, path = str(body["name"]), str(body["path"])
            adapters = coordinator.adapters
            read_model_name(coordinator.model, adapters.names, body.get("model"))

            def require_free() -> None:
                if any(name in other.names for other in backends.all()):
                    raise ConfigurationError(
                        f"the name {name!r} is taken: give the adapter another"
                    )
                adapters.require_free(name)

            try:
                require_free()
                adapter = await trio.to_thread.run_sync(
                    lambda: adapters.read(name, adapter_directory(_below(below, path))),
                    limiter=reading,
                )
                async with changing:
                    require_free()  # others have come meanwhile
                    added = AddedAdapter(
                        coordinator.model.name,
                        os.path.relpath(adapter.directory, below.resolve()),
                        adapter.source.key.hex(),
                    )
                    with keeping():
                        await kept.keep_adapter(name, added)
                    adapters.add(adapter)
            except (ConfigurationError, ModelError) as exc:
                raise APIError(400, str(exc), code="adapter_refused") from exc
            entry = describe_adapter(coordinator.model, adapter, created=int(time.time()))
            return JSONResponse(entry)

    async def remove(request: Request) -> Response:
        _require_root(root)
        name = str(request.path_params["name"])
        backends.require_one()
        backend = next((each for each in backends.all() if name in each.names), None)
        async with changing:
            with keeping():
                was_kept = await kept.forget_adapter(name)
            is_served = backend is not None and await backend.remove_adapter(name)
        if not (was_kept or is_served):
            raise APIError(
                404, f"there is no adapter {name[:100]!r}", param="name", code="adapter_not_found"
            )
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    return [
        Route("/v1/adapters", add, methods=["POST"]),
        Route("/v1/adapters/{name:path}", remove, methods=["DELETE"]),
    ]


async def restore_adapters(coordinator: Coordinator, additions: Additions, root: Path) -> None:
    """Serve those beside a model again that clients had added; of those that cannot be, a line each says why.

    Args:
        root: as for `adapter_routes`.
    """
    adapters = coordinator.adapters
    for name, added in additions.adapters_of(coordinator.model.name).items():
        known = adapters.get(name)
        if known is not None and known.source.key.hex() == added.key:
            continue  # whoever started the server named it, too
        try:
            adapters.require_free(name)
            adapter = await trio.to_thread.run_sync(
                lambda name=name, added=added: adapters.read(name, _below(root, added.path))
            )
            if adapter.source.key.hex() != added.key:
                raise ConfigurationError(
                    f"what is in {adapter.directory} is not what was added: add it again"
                )
            adapters.add(adapter)
        except (ConfigurationError, ModelError) as exc:
            logger.warning("the adapter %s, which a client had added, is not served: %s", name, exc)


def _require_root(root: Path | None) -> Path:
    if root is None:
        raise APIError(
            403,
            "adapters are added and removed here only where the server was started with --adapter-root DIR",
            code="adapters_fixed",
        )
    return root


def _below(root: Path, path: str) -> Path:
    """A directory below the root, whatever links there are.

    Raises:
        ConfigurationError: it is elsewhere, or not there.
    """
    found = (root / path).resolve()
    if not found.is_relative_to(root.resolve()) or not found.is_dir():
        # The same, so that nobody learns what else there is on this machine.
        raise ConfigurationError(f"there is no directory {path[:200]!r} below --adapter-root")
    return found
