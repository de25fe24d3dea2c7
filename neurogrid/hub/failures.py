"""Errors of library, network and disk while a model is fetched, in a sentence for whoever typed its name."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from neurogrid.errors import ConfigurationError
from neurogrid.hub.cache import cache_directory
from neurogrid.hub.names import ModelName

__all__ = ["telling_errors"]

# No room: on the disk, of a quota, or of a limit of this process.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def telling_errors(name: ModelName) -> Iterator[None]:
    """Turn all of it, within the block, into a ConfigurationError that says what happened and what to do."""
    hub = constants.ENDPOINT
    try:
        yield
    except RevisionNotFoundError as exc:
        raise ConfigurationError(
            f"{name.repository} has no revision {name.revision} at {hub}"
        ) from exc
    except GatedRepoError as exc:
        how = (
            "the token that is set (HF_TOKEN, or hf auth login) is not let in"
            if get_token()
            else "log in (hf auth login), or set HF_TOKEN"
        )
        raise ConfigurationError(
            f"{name.repository} is given to those only who were let in: ask at {hub}/{name.repository}; {how}"
        ) from exc
    except RepositoryNotFoundError as exc:
        raise ConfigurationError(
            f"there is no directory {name} here, and no model {name.repository} at {hub} that this machine may see; "
            "private ones need a token (hf auth login, or HF_TOKEN)"
        ) from exc
    except HfHubHTTPError as exc:
        raise ConfigurationError(_of_status(exc.response.status_code, name, hub)) from exc
    except httpx2.HTTPError as exc:
        raise ConfigurationError(
            f"{hub} cannot be reached ({_reason(exc)}), and {name} is not whole in {cache_directory()}"
        ) from exc
    except LocalEntryNotFoundError as exc:  # of the library, where it gave up
        cause: Any = exc.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise ConfigurationError(_of_status(cause.response.status_code, name, hub)) from exc
        reason = _reason(cause or exc)
        raise ConfigurationError(
            f"{hub} did not give all of {name} ({reason}): try again, which goes on from here"
        ) from exc
    except FileMetadataError as exc:
        raise ConfigurationError(
            f"{hub} does not answer as a hub of models does: is HF_ENDPOINT right?"
        ) from exc
    except OSError as exc:
        where = exc.filename or cache_directory()
        if exc.errno in _FULL:
            raise ConfigurationError(
                f"the disk of {cache_directory()} is full ({exc.strerror}) before {name} was whole: make room, or set "
                "HF_HOME to a directory on another disk; what came is kept"
            ) from exc
        raise ConfigurationError(
            f"{name} cannot be fetched: {where}: {exc.strerror or _reason(exc)}"
        ) from exc


def _of_status(status: int, name: ModelName, hub: str) -> str:
    if status == 401:
        return f"{hub} does not take the token that is set (HF_TOKEN, or hf auth login): status 401"
    if status == 403:
        return f"{hub} does not give {name} to the token that is set (HF_TOKEN, or hf auth login): status 403"
    if status == 404:
        return f"{hub} does not answer as a hub of models does (status 404): is HF_ENDPOINT right?"
    if status == 429:
        return f"{hub} was asked too often from here (status 429): try again later"
    return f"{hub} did not give {name}: status {status}; try again, which goes on from here"


def _reason(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__
