"""Blocking twins of async methods, made from them: the same parameters, result, errors and docstring.

    class Host(Blocking[AsyncHost]):
        connect = twin(AsyncHost.connect)

Type checkers and editors see a plain method: its parameters are those of the async one, by name and kind, and it
returns what the other's coroutine does. So nothing about it is written twice, and nothing can drift apart.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from neurogrid.p2p.blocking.trio_thread import TrioThread

__all__ = ["Blocking", "iterating_twin", "shown_as", "sync_twin", "twin"]

T = TypeVar("T")
# Covariant, so that the twin of a method that a class has from its base fits the class.
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Blocking(Generic[T_co]):
    """A blocking face of an object that lives in the thread of a trio loop."""

    def __init__(self, thread: TrioThread[Any], inner: T_co) -> None:
        self._thread = thread
        self._inner = inner


def twin(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Blocking[T], P], R]:
    """A method that runs `method` of the async object in the loop and waits for its end."""

    @functools.wraps(method)
    def call(self: Blocking[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        # By name, so that a method which a subclass overrides is the one that runs.
        bound: Callable[P, Coroutine[Any, Any, R]] = getattr(self._inner, method.__name__)
        return self._thread.call(partial(bound, *args, **kwargs))

    return call


def sync_twin(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[Blocking[T], P], R]:
    """`twin` of a method that is not async, and that only the loop's thread may call."""

    @functools.wraps(method)
    def call(self: Blocking[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[P, R] = getattr(self._inner, method.__name__)
        return self._thread.call_sync(partial(bound, *args, **kwargs))

    return call


def iterating_twin(
    method: Callable[Concatenate[T, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Blocking[T], P], Iterator[R]]:
    """`twin` of an async generator: an iterator, whose end or closing ends the other."""

    @functools.wraps(method)
    def call(self: Blocking[T], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        bound: Callable[P, AsyncGenerator[R, None]] = getattr(self._inner, method.__name__)
        return self._thread.iterate(partial(bound, *args, **kwargs))

    given = inspect.signature(method).return_annotation
    return shown_as(
        call, method, gives=re.sub(r"^AsyncGenerator\[(.*), None\]$", r"Iterator[\1]", given)
    )


def shown_as(function: F, like: Callable[..., Any], *, gives: str) -> F:
    """`function`, with the signature of `like` for its readers, but for what it gives."""
    shown: Any = function  # `inspect` reads the attribute, which types do not know
    shown.__signature__ = inspect.signature(like).replace(return_annotation=gives)
    return function
