"""The blocking face is the async one: every public coroutine method, with its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from neurogrid import p2p
from neurogrid.p2p import blocking, transfer

# What has no blocking twin, and why.
WITHOUT_TWIN = {
    "Host.open_stream": "raw streams are for tasks: one reads while another writes",
}
PAIRS: list[tuple[type, type]] = [
    (p2p.Host, blocking.Host),
    (p2p.Protocol, blocking.Protocol),
    (transfer.Transfers, blocking.Transfers),
]


def public_methods(cls: type) -> Iterator[tuple[str, object]]:
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") and f"{cls.__name__}.{name}" not in WITHOUT_TWIN:
            yield name, member


def coroutine_methods() -> list[tuple[type, type, str]]:
    return [
        (ours, theirs, name)
        for ours, theirs in PAIRS
        for name, member in public_methods(ours)
        if inspect.iscoroutinefunction(member)
    ]


@pytest.mark.parametrize(("ours", "theirs", "name"), coroutine_methods())
def test_every_coroutine_method_has_its_twin(ours: type, theirs: type, name: str) -> None:
    twin = getattr(theirs, name)
    assert not inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(getattr(ours, name))
    assert inspect.getdoc(twin) == inspect.getdoc(getattr(ours, name))


def test_every_handler_can_be_registered() -> None:
    names = [name for name, _ in public_methods(p2p.Protocol) if name.endswith("_received")]
    assert len(names) >= 9
    for name in [*names, "on_message"]:
        twin, method = getattr(blocking.Protocol, name), getattr(p2p.Protocol, name)
        assert list(inspect.signature(twin).parameters) == list(
            inspect.signature(method).parameters
        )


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in PAIRS if pair[0] is not p2p.Host])
def test_they_are_made_alike(ours: type, theirs: type) -> None:
    """All options of the constructor, with their defaults; the first parameter is what it stands on."""
    options = list(inspect.signature(ours).parameters.values())[1:]
    assert list(inspect.signature(theirs).parameters.values())[1:] == options


def test_a_host_is_opened_alike() -> None:
    signature = inspect.signature(blocking.open_host)
    assert signature.parameters == inspect.signature(p2p.open_host).parameters
    assert signature.return_annotation == "AbstractContextManager[Host]"


def test_blobs_are_sent_alike() -> None:
    ours = inspect.signature(transfer.send_blob)
    assert inspect.signature(blocking.send_blob) == ours
    assert not inspect.iscoroutinefunction(blocking.send_blob)


def test_a_policy_is_asked_alike() -> None:
    ours = dict(public_methods(transfer.TransferPolicy))
    theirs = dict(public_methods(blocking.TransferPolicy))
    assert list(ours) == list(theirs)
    for name, method in theirs.items():
        assert not inspect.iscoroutinefunction(method)
        assert inspect.signature(method) == inspect.signature(ours[name]), name
