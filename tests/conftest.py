"""For all tests: one torch thread, since several on contended cores are many times slower; a cache of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor in the cache of whoever runs the tests, nor out of it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="neurogrid-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
