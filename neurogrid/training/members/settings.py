"""Resources that the owner of a machine lends to training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemberSettings"]


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Resources that a member may use, and its name, invitation and price.

    Attributes:
        name: what people call the machine.
        device: of torch.
        threads: of torch, on a CPU; 0 for its own choice.
        memory: bytes that the trainer may take, of main memory or of the GPU's; 0 for what is free.
        cores: that are lent.
        gpu: the name of the GPU; empty for none.
        storage: bytes for slices.
        data: directories of the owner's with slices, which are not fetched then, and given to others.
        directory: where slices are kept from one run to the next; None for no longer than this process.
        invitation: of the leader of an open run, signed, by which this member counts at once; empty for none.
        price: that is asked, in the unit that those who take part have agreed on.
    """

    name: str = ""
    device: str = "cpu"
    threads: int = 0
    memory: int = 0
    cores: int = 1
    gpu: str = ""
    storage: int = 16 * 1024**3
    data: tuple[Path, ...] = ()
    directory: Path | None = None
    invitation: bytes = b""
    price: float = 0.0
