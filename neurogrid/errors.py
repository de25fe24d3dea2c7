"""The errors of NeuroGrid: one root, and a class for each thing that a caller can do something about.

Retry policy reads `retryable` of the class, never the text. A text says what happened and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "NeuroGridError",
    "ConfigurationError",
    "LocalProtocolError",
    "TooLargeForPeerError",
    "RemoteProtocolError",
    "ConfigFormatError",
    "PeerRefusedError",
    "ConfigRequiredError",
    "RequestRefusedError",
    "TransportError",
    "PeerUnreachableError",
    "StreamBrokenError",
    "HeaderWriteError",
    "DataWriteError",
    "ResponseTimeout",
    "NoRouteError",
    "CapacityError",
    "ModelError",
    "CheckpointError",
    "UnsupportedModelError",
    "NotFiniteError",
]


class NeuroGridError(Exception):
    """The root of all errors that NeuroGrid raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigurationError(NeuroGridError):
    """Something that was asked for cannot be right; the user can mend it (exit status 2)."""


class LocalProtocolError(NeuroGridError):
    """We were about to break the protocol: a bug of ours, or of the caller. Never retried."""


class TooLargeForPeerError(LocalProtocolError):
    """A message has more Data than its receiver said that it accepts; nothing of it was sent."""


class RemoteProtocolError(NeuroGridError):
    """The peer broke the protocol. `code` is the wire error code to answer with."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class ConfigFormatError(RemoteProtocolError):
    """The Data of a ModelConfig message is no model config: empty, null, malformed, a field missing
    or out of its range."""

    def __init__(self, message: str, *, code: int = 7) -> None:
        super().__init__(message, code=code)


class PeerRefusedError(NeuroGridError):
    """The peer answered with an Error message.

    Attributes:
        code: the error code of the registry (`neurogrid.p2p.wire.ErrorCode`).
        text: the peer's own words, bounded and printable.
        retry_after: seconds after which the peer suggests to try again, or None.
    """

    def __init__(
        self, message: str, *, code: int, text: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.text = text
        self.retry_after = retry_after


class ConfigRequiredError(PeerRefusedError):
    """The peer was sent weights, an assignment or an activation before a model config."""


class RequestRefusedError(NeuroGridError):
    """We refuse what a peer asked for; raised by handlers, sent to the peer as an Error message.

    Attributes:
        code: the error code of the registry (`neurogrid.p2p.wire.ErrorCode`).
        retry_after: seconds after which the peer may try again, or None.
        is_expected: nobody did anything wrong, as where a message crosses the end of what it belongs to: worth no
            warning.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int,
        retry_after: float | None = None,
        is_expected: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.is_expected = is_expected


class TransportError(NeuroGridError):
    """The bytes did not get there, or no answer came back."""

    retryable = True


class PeerUnreachableError(TransportError):
    """No connection or no stream to the peer could be opened.

    Attributes:
        is_refused: the machine is there, and nobody listens at that port: the process has ended, or listens elsewhere.
    """

    def __init__(self, *args: object, is_refused: bool = False) -> None:
        super().__init__(*args)
        self.is_refused = is_refused


class StreamBrokenError(TransportError):
    """A stream or its connection ended while it was in use."""


class HeaderWriteError(StreamBrokenError):
    """A stream broke before any of the message went out: it may be sent again, over another stream."""


class DataWriteError(StreamBrokenError):
    """A stream broke while a message went out: the peer has it in part, if at all, or whole."""


class ResponseTimeout(TransportError):
    """The peer did not answer within the deadline."""


class NoRouteError(NeuroGridError):
    """Some layers are held by no reachable peer.

    Attributes:
        layers: which layers.
        peer_id: the peer that held them, and is gone or failed; None where nobody did.
        unreachable_from: the worker that cannot reach `peer_id`, where that one is there all the same and it is the
            link between the two that is lost.
    """

    def __init__(
        self,
        message: str,
        *,
        layers: Sequence[int] = (),
        peer_id: str | None = None,
        unreachable_from: str | None = None,
    ) -> None:
        super().__init__(message)
        self.layers = tuple(layers)
        self.peer_id = peer_id
        self.unreachable_from = unreachable_from


class CapacityError(NeuroGridError):
    """The model does not fit. `needed` and `available` are bytes."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class ModelError(NeuroGridError):
    """Something is wrong with the model itself."""


class CheckpointError(ModelError):
    """A file of the checkpoint is missing, truncated or not what it claims to be."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be split, or was not proven equal to the whole model."""


class NotFiniteError(NeuroGridError):
    """Numbers that were to be sent or aggregated are NaN or infinite, or became so.

    Attributes:
        index: which element, of a vector; which row, of several.
    """

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index
