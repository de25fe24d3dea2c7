"""Ports of HTTP servers: tried before a server is loaded, and opened."""

from __future__ import annotations

import errno
import socket

import trio

from neurogrid.errors import ConfigurationError

__all__ = ["check_port", "open_listeners"]

BACKLOG = 128


async def _resolve(host: str, *, flags: str = "--http") -> list[str]:
    """The addresses that `host`, a name or an address, stands for on this machine; `flags` as for `open_listeners`.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        found = await trio.socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigurationError(
            f"{flags}-host {host[:100]} is no address and no name that is known here: {exc.strerror}"
        ) from exc
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def check_port(host: str, port: int, *, flags: str = "--http") -> None:
    """Try whether `open_listeners` could listen there. No client can connect meanwhile and take it for the server.

    Raises:
        ConfigurationError: as `open_listeners`.
    """
    for address in await _resolve(host, flags=flags):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with trio.socket.socket(family, socket.SOCK_STREAM) as probe:
                # As servers do: a port whose last connections are in TIME_WAIT is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                await probe.bind((address, port))
        except OSError as exc:
            raise ConfigurationError(_why_not(address, port, flags, exc)) from exc


async def open_listeners(
    host: str, port: int, *, flags: str = "--http"
) -> list[trio.SocketListener]:
    """Listen on every address of `host`, on the same port.

    Args:
        host: address or name to listen on.
        port: 0 for a free one.
        flags: how the options begin that chose both, for errors.

    Raises:
        ConfigurationError: the port is taken, or the host is not this machine's.
    """
    listeners: list[trio.SocketListener] = []
    for address in await _resolve(host, flags=flags):
        try:
            opened = await trio.open_tcp_listeners(port, host=address, backlog=BACKLOG)
        except OSError as exc:
            for listener in listeners:
                await listener.aclose()
            raise ConfigurationError(_why_not(address, port, flags, exc)) from exc
        listeners += opened
        port = listeners[0].socket.getsockname()[1]  # the same for all
    return listeners


def _why_not(address: str, port: int, flags: str, error: OSError) -> str:
    codes = {
        part.errno
        for part in (error, error.__cause__, error.__context__)
        if isinstance(part, OSError)
    }
    if errno.EADDRINUSE in codes:
        return f"port {port} of {address} is taken: {flags}-port N chooses another, 0 a free one"
    if errno.EACCES in codes:
        return (
            f"port {port} may not be listened on by this user: take one above 1023 ({flags}-port)"
        )
    return f"cannot listen on {address}, port {port} ({flags}-host, {flags}-port): {error.strerror or error}"
