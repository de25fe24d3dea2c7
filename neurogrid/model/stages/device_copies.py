"""Copies of tensors from the CPU to a device, while what is computed there goes on.

To an accelerator with streams they go through pinned memory, by a stream of their own: the copy engine works while the
next tensor is pinned. Where there are none (MPS, whose memory is the machine's), a copy is a plain one.
"""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["DeviceCopies"]

# Of the host's memory: pinned memory cannot be swapped, and torch keeps it.
_MAX_PINNED_BYTES = 256 * 1024 * 1024


class DeviceCopies:
    """Copies to one device, of which all are there when the block is left.

    Nobody may read one before, nor write to the tensors that are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.Stream(device) if _has_streams(device) else None
        self._pinned_bytes = 0

    def __enter__(self) -> DeviceCopies:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._copying is not None:
            self._copying.synchronize()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on the device, without gradients; the tensor itself if it is there."""
        tensor = tensor.detach()
        if self._copying is None or tensor.device == self._device:
            return tensor.to(self._device)
        # Made by the stream that computes with it later, so that its memory is not another's too early when it is let
        # go; and written to only when that stream has done what it had to do with this memory before.
        target = torch.empty_like(tensor, device=self._device)
        self._copying.wait_stream(torch.accelerator.current_stream(self._device))
        with self._copying:
            target.copy_(tensor.pin_memory(), non_blocking=True)
        self._pinned_bytes += tensor.nbytes
        if self._pinned_bytes > _MAX_PINNED_BYTES:
            self._copying.synchronize()
            self._pinned_bytes = 0
        return target


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")
