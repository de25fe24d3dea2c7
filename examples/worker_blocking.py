"""Lend this machine to a model, without async, and print where: python examples/worker_blocking.py"""

import threading

from neurogrid import WorkerSettings, blocking

with blocking.open_worker(WorkerSettings(memory_limit=2**30)) as worker:
    print(worker.addresses[0], flush=True)
    threading.Event().wait()
