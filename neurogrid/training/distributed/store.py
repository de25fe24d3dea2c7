"""A store of `torch.distributed` that rank 0 serves over its exchange: with it nothing is needed beside NeuroGrid.

Rank 0 asks itself in the same way, without a stream.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
import trio

from neurogrid.errors import PeerRefusedError, ResponseTimeout, TransportError
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.key_values import KeyValues
from neurogrid.training.distributed.node import NodeThread
from neurogrid.training.wire import MAX_WAIT, StoreAnswer, StoreQuestion, TrainingMessage

__all__ = ["ServedStore", "serve_store"]

# Seconds for the way there and back, beside what is waited for.
ANSWER_TIMEOUT = 30.0

# Its annotations have another form of each method.
_torch: Any = dist


def serve_store(exchange: Exchange) -> None:
    """Answer what ranks ask; in the loop's thread."""
    kept = KeyValues()
    changed = RenewedEvent()

    async def serve(message: TensorMessage) -> None:
        question = StoreQuestion.decode(message.data)
        values: tuple[bytes, ...] = ()
        with trio.move_on_after(question.wait):
            while question.action in ("get", "wait") and not kept.has(question.keys):
                await changed.wait()
        if question.action not in ("get", "wait") or kept.has(question.keys):
            values = (kept.answer(question),)
            changed.set()
        answer = TensorMessage(
            msg_type=TrainingMessage.STORED,
            request_id=message.request_id,
            data=StoreAnswer(values).encode(),
        )
        assert message.from_peer is not None
        await exchange.send(message.from_peer, answer)

    exchange.on_message(TrainingMessage.ASK_STORE, serve)


class ServedStore(_torch.Store):  # type: ignore[misc]
    """The store of rank 0, for any rank. Torch calls its methods by these names.

    Raises:
        RankError: from each method: rank 0 is gone, does not answer or refuses, or a key did not come in time.
    """

    def __init__(self, thread: NodeThread, peer_id: str, timeout: float) -> None:
        super().__init__()
        self._thread = thread
        self._peer_id = peer_id
        self._seconds = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._ask("set", [key], [value])

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to a value."""
        self._ask("append", [key], [value])

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._ask("get", [key], wait=self._seconds)

    def add(self, key: str, value: int) -> int:
        """Add to a number; returns the sum."""
        return int(self._ask("add", [key], [str(value)]))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return self._ask("check", keys) == b"1"

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is what is expected; returns what is there then."""
        return self._ask("compare_set", [key], [expected, desired])

    def delete_key(self, key: str) -> bool:
        """Forget a value; returns whether there was one."""
        return self._ask("delete_key", [key]) == b"1"

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("num_keys", []))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._ask("wait", keys, wait=self._seconds if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Keep several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether it has `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait this long for keys."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Timeout of waiting for keys."""
        return timedelta(seconds=self._seconds)

    def clone(self) -> ServedStore:
        """The store itself, which any thread may use."""
        return self

    def _ask(
        self,
        action: str,
        keys: list[str],
        values: list[str | bytes] | None = None,
        wait: float = 0.0,
    ) -> bytes:
        wait = min(max(wait, 0.0), MAX_WAIT)
        brought = [v.encode() if isinstance(v, str) else bytes(v) for v in values or []]
        question = StoreQuestion(action, tuple(keys), tuple(brought), wait)
        message = TensorMessage(
            msg_type=TrainingMessage.ASK_STORE,
            request_id=new_request_id(),
            data=question.encode(),
        )
        request = partial(
            self._thread.node.exchange.request,
            self._peer_id,
            message,
            TrainingMessage.STORED,
            timeout=wait + ANSWER_TIMEOUT,
        )
        try:
            answer = StoreAnswer.decode(self._thread.call(request).data)
        except (TransportError, PeerRefusedError) as exc:
            how = "did not answer" if isinstance(exc, ResponseTimeout) else "was lost or refuses"
            raise RankError(
                f"rank 0 ({self._peer_id}), which has the store, {how}: {exc}", ranks=[0]
            ) from exc
        if not answer.values:
            raise RankError(f"waited {wait:g} s for {', '.join(keys)} in the store of rank 0")
        return answer.values[0]
