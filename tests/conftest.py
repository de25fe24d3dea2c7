"""For all tests: one torch thread, since several on contended cores are many times slower."""

from __future__ import annotations

import os

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")
