"""For all tests: one torch thread, since several on contended cores are many times slower; a cache of their own; and
no property that fails because the machine is slow."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor in the cache of whoever runs the tests, nor out of it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="neurogrid-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")
