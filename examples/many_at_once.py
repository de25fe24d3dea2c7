"""Continue several texts at once, from threads: python examples/many_at_once.py ADDRESS (of worker_blocking.py)"""

import sys
from concurrent.futures import ThreadPoolExecutor

from neurogrid import CoordinatorSettings, blocking

settings = CoordinatorSettings(peers=(sys.argv[1],), max_sessions=3)
prompts = ("A function definition", "A class definition", "The for statement")
with blocking.open_coordinator(settings) as coordinator, ThreadPoolExecutor() as threads:
    for prompt, text in zip(prompts, threads.map(coordinator.complete, prompts), strict=True):
        print(f"{prompt}:{text.splitlines()[0]}")
