"""Presets: names for several values at once, after systems that train this way. What a run file says itself wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from neurogrid.training.runs.run_file.section import WrongValueError

__all__ = ["PRESETS", "preset_values"]

PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    # Whole models, work by projection, differences in float32 to an averaging server, Nesterov.
    "hypha": {
        "inner": {"optimizer": "adamw"},
        "outer": {
            "method": "diloco",
            "lr": 0.7,
            "momentum": 0.9,
            "codec": "f32",
            "projected": True,
            "way": "server",
            "aggregator": "mean",
        },
    },
    # Stages of several members, of a model from random weights: gradients at a low rank, a twentieth of the weights
    # averaged every five steps. `stages` is the run file's to say, and `subspace`.
    "node0": {
        "inner": {"optimizer": "adamw", "lr": 3e-4, "weight_decay": 0.1, "clip": 1.0},
        "layout": {"stage_members": 64, "power_sgd": 64, "weights_every": 5},
    },
    # The greatest frequencies of momenta in one bit, a round a step, witnesses by chance; members come and go between
    # epochs.
    "psyche": {
        "inner": {"lr": 4e-4, "schedule": "cosine", "clip": 0},
        "outer": {"method": "distro"},
        "distro": {"top_k": 8, "chunk": 64, "one_bit": True, "decay": 0.999},
        "epochs": {"rounds": 500, "warmup": 300, "train": 300, "witness": 30, "cooldown": 120},
    },
    # 500 steps each for itself, and a trimmed mean of differences; machines of about the same memory are taken for
    # alike, so that a restart gives the same cut.
    "neuroshard": {
        "inner": {"optimizer": "adamw", "lr": 1e-4, "clip": 1.0},
        "outer": {
            "method": "diloco",
            "every": 500,
            "lr": 0.7,
            "momentum": 0.9,
            "codec": "f32",
            "aggregator": "trimmed_mean",
        },
        "layout": {"memory_tier": 500},
    },
}


def preset_values(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The values of a preset by section; none for the empty name.

    Raises:
        WrongValueError: there is none of that name.
    """
    if not name:
        return {}
    if name in PRESETS:
        return PRESETS[name]
    known = ", ".join(f'"{each}"' for each in PRESETS)
    raise WrongValueError(f"preset is {known}, not another", ("preset",))
