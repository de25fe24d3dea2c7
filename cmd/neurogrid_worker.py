"""Run `neurogrid-worker` from a checkout."""

from neurogrid.cli.entry import worker

worker()
