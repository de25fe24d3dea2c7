"""Questions of ranks to the store in which they find each other, and its answers.

Source: protocol_spec/training/process-groups.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.forms import Map, array, binary, one_of, optional, seconds, text

__all__ = [
    "MAX_KEY_CHARS",
    "MAX_VALUE_BYTES",
    "MAX_WAIT",
    "STORE_ACTIONS",
    "StoreAnswer",
    "StoreQuestion",
]

STORE_ACTIONS: Final = frozenset(
    {"set", "append", "get", "add", "check", "wait", "compare_set", "delete_key", "num_keys"}
)
"""Actions that may be asked for; the names are those of `torch.distributed.Store`."""

MAX_KEY_CHARS: Final = 1024
# Ranks keep addresses and numbers in a store.
MAX_VALUE_BYTES: Final = 256 * 1024
# A key for each rank of a group, three times.
MAX_KEYS: Final = 4096
# Seconds: torch waits half an hour by default.
MAX_WAIT: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class StoreQuestion(ControlPayload):
    """Question to the store.

    Attributes:
        action: one of `STORE_ACTIONS`.
        keys: of what.
        values: what `set`, `append` and `add` bring (a number in decimal); what `compare_set` expects, and wants.
        wait: seconds that `get` and `wait` may wait for their keys.
    """

    action: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    wait: float = 0.0

    _map = Map(
        "a question to a store",
        {
            "action": one_of(STORE_ACTIONS),
            "keys": optional(array(text(MAX_KEY_CHARS), MAX_KEYS)),
            "values": optional(array(binary(MAX_VALUE_BYTES), 2)),
            "wait": optional(replace(seconds(MAX_WAIT), absent=0.0)),
        },
    )


@dataclass(frozen=True, slots=True)
class StoreAnswer(ControlPayload):
    """The answer.

    Attributes:
        values: one where there is something to say (a number in decimal); none where a wait was in vain.
    """

    values: tuple[bytes, ...] = ()

    _map = Map("the answer of a store", {"values": optional(array(binary(MAX_VALUE_BYTES), 1))})
