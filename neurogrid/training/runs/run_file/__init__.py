"""Run files: what a training run is to do, in TOML (`docs/training.md`).

Text in, frozen sections out, and back. No file is opened here, and nothing that a section names is looked at.

    mixture     the sources of a mixture
    values      the kinds of values, each with the words that say what is allowed
    section     what all sections have in common: a value is checked where it is put in
    sections    the sections, with the defaults
    stage_sections  those about a model in stages
    checks_section  the one about what is computed again
    epoch_sections  those about witnessed runs
    run_file    all of them, what only fits together, and the text with every default
    presets     names for several values at once
    places      the line of each key
    parsing     from text, with what is wrong in one line
"""

from neurogrid.training.runs.run_file.checks_section import ChecksSection
from neurogrid.training.runs.run_file.epoch_sections import DistroSection, EpochsSection
from neurogrid.training.runs.run_file.parsing import (
    RunFileError,
    parse_kept_run_file,
    parse_run_file,
)
from neurogrid.training.runs.run_file.run_file import RunFile
from neurogrid.training.runs.run_file.section import WrongValueError
from neurogrid.training.runs.run_file.sections import (
    CheckpointsSection,
    DataSection,
    EvalSection,
    InnerSection,
    MembersSection,
    ModelSection,
    OuterSection,
    StopSection,
    TrackSection,
)
from neurogrid.training.runs.run_file.stage_sections import (
    MAX_STAGES,
    AdapterSection,
    LayoutSection,
)

__all__ = [
    "MAX_STAGES",
    "AdapterSection",
    "CheckpointsSection",
    "ChecksSection",
    "DataSection",
    "DistroSection",
    "EpochsSection",
    "EvalSection",
    "InnerSection",
    "LayoutSection",
    "MembersSection",
    "ModelSection",
    "OuterSection",
    "RunFile",
    "RunFileError",
    "StopSection",
    "TrackSection",
    "WrongValueError",
    "parse_kept_run_file",
    "parse_run_file",
]
