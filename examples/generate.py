"""Continue a text, under trio, with two workers that are started on this machine: python examples/generate.py"""

import trio

from neurogrid import CoordinatorSettings, open_coordinator


async def main() -> None:
    async with open_coordinator(CoordinatorSettings(local_workers=2)) as coordinator:
        async for piece in coordinator.stream("A function definition", max_tokens=40):
            print(piece, end="", flush=True)


trio.run(main)
