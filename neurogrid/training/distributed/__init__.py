"""The backend `neurogrid` of `torch.distributed`: process groups over libp2p, encrypted, for scripts as they are.

    import neurogrid.training.distributed
    torch.distributed.init_process_group("neurogrid", rank=rank, world_size=world_size)

Importing it registers the backend; what it needs is imported with the first process group.
"""

from neurogrid.training.distributed.backend import register_backend

__all__ = ["register_backend"]

register_backend()
