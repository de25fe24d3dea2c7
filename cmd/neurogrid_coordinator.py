"""Run `neurogrid-coordinator` from a checkout."""

from neurogrid.cli.coordinator import main

raise SystemExit(main())
