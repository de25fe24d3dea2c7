"""Lend this machine to a model, under trio, and print where: python examples/worker.py"""

import trio

from neurogrid import WorkerSettings, open_worker


async def main() -> None:
    async with open_worker(WorkerSettings(memory_limit=2**30)) as worker:
        print(worker.addresses[0], flush=True)
        await trio.sleep_forever()


trio.run(main)
