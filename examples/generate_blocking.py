"""Continue a text, without async: python examples/generate_blocking.py ADDRESS (as worker.py prints it)"""

import sys

from neurogrid import CoordinatorSettings, blocking

with blocking.open_coordinator(CoordinatorSettings(peers=(sys.argv[1],))) as coordinator:
    for piece in coordinator.stream("A function definition", max_tokens=40):
        print(piece, end="", flush=True)
