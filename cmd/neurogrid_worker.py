"""Run `neurogrid-worker` from a checkout."""

from neurogrid.cli.worker import main

raise SystemExit(main())
