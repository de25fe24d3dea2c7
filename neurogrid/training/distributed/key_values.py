"""Values by key, with the actions that `torch.distributed.Store` has: what rank 0 keeps. Pure."""

from __future__ import annotations

from typing import Final

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.wire import MAX_VALUE_BYTES, StoreQuestion

__all__ = ["KeyValues"]

# Groups come and go, and their keys stay.
MAX_KEYS: Final = 256 * 1024
MAX_BYTES: Final = 64 * 1024 * 1024

# How many keys and values each action has.
_FORMS: Final = {
    "set": (1, 1),
    "append": (1, 1),
    "add": (1, 1),
    "get": (1, 0),
    "compare_set": (1, 2),
    "delete_key": (1, 0),
    "num_keys": (0, 0),
}


class KeyValues:
    """The values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def has(self, keys: tuple[str, ...]) -> bool:
        """Whether all keys have values."""
        return all(key in self._values for key in keys)

    def answer(self, question: StoreQuestion) -> bytes:
        """Do what is asked, of keys that are there if that has to wait for them; returns what there is to say.

        Raises:
            RequestRefusedError: it makes no sense, or the store is full.
        """
        action, keys, values = question.action, question.keys, question.values
        if action in ("check", "wait"):
            return b"1" if self.has(keys) else b"0"
        if (len(keys), len(values)) != _FORMS[action]:
            raise _refused(f"{action} with {len(keys)} keys and {len(values)} values")
        if action == "num_keys":
            return str(len(self._values)).encode()
        (key,) = keys
        held = self._values.get(key, b"")
        if action == "delete_key":
            if key not in self._values:
                return b"0"
            self._num_bytes -= len(key) + len(self._values.pop(key))
            return b"1"
        if action == "set":
            self._keep(key, values[0])
        elif action == "append":
            self._keep(key, held + values[0])
        elif action == "add":
            self._keep(key, str(_number(held or b"0") + _number(values[0])).encode())
        elif action == "compare_set":
            return self._compare_set(key, *values)
        return self._values.get(key, b"")

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        # As torch's stores have it: nothing equals what is not there, but an empty value does.
        held = self._values.get(key)
        if held is None and expected:
            return expected
        if held is None or held == expected:
            self._keep(key, desired)
            return desired
        return held

    def _keep(self, key: str, value: bytes) -> None:
        held = self._values.get(key)
        added = len(value) - len(held) if held is not None else len(key) + len(value)
        if len(value) > MAX_VALUE_BYTES:
            raise _refused(f"a value of {len(value)} B; at most {MAX_VALUE_BYTES} B are kept")
        has_no_key_left = held is None and len(self._values) >= MAX_KEYS
        if self._num_bytes + added > MAX_BYTES or has_no_key_left:
            raise _refused("the store is full")
        self._values[key] = value
        self._num_bytes += added


def _number(data: bytes) -> int:
    try:
        if len(data) > 20:
            raise ValueError
        return int(data)
    except ValueError:
        raise _refused(f"{data[:20]!r} is no number to add to") from None


def _refused(reason: str) -> RequestRefusedError:
    return RequestRefusedError(f"not in a store: {reason}", code=ErrorCode.LIMIT_EXCEEDED)
