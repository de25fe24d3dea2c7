"""Run `neurogrid` from a checkout."""

import os
import sys

# This directory, where this very file has the name of the package.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

from neurogrid.cli.entry import neurogrid  # noqa: E402 - not before that directory is out of the path

neurogrid()
