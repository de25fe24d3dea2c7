"""Run `neurogrid` from a checkout."""

from neurogrid.cli.main import main

raise SystemExit(main())
