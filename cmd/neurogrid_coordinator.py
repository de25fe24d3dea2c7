"""Run `neurogrid-coordinator` from a checkout."""

from neurogrid.cli.entry import coordinator

coordinator()
