"""A worker whose transformers make a larger model of the same config, as those of another version may.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from neurogrid.cli.commands.worker import main
from neurogrid.training.members import participation
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.trainers import trainer_settings


def settings(run: RunFile, config: str, **options: Any) -> Any:
    """Those of a model with one layer more."""
    told = json.loads(config)
    return trainer_settings(
        run, json.dumps(told | {"num_hidden_layers": told["num_hidden_layers"] + 1}), **options
    )


if __name__ == "__main__":
    # In its place for this program alone: another library cannot be installed beside this one.
    participation.trainer_settings = settings  # type: ignore[attr-defined]
    sys.exit(main())
