"""The proof of a config, from any sender: that its model can be built and split, and what its layers cost.

Building a model takes what its config says, and nobody knows what that is before: a config of 300 bytes may ask for
minutes and gigabytes. So all of it is tried in a child process with limits (confined.py), and only a config that is
proven is built where it is used.

Answers are kept for the process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from neurogrid.errors import ConfigurationError, NeuroGridError, UnsupportedModelError
from neurogrid.model.confined import ConfinedProcess, ConfinementError, Limits
from neurogrid.model.files.config import (
    COMPUTE_DTYPES,
    build_config,
    config_fingerprint,
    resolve_dtype,
)
from neurogrid.model.files.model_code import one_line
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.proof.miniature import SplitTraits, check_splittable
from neurogrid.model.proof.miniature_experts import check_experts
from neurogrid.model.proof.miniature_images import check_images
from neurogrid.model.stages.cost import LayerCost, layer_cost
from neurogrid.model.stages.stage import Stage

__all__ = ["OWN_SECONDS", "PEER_SECONDS", "Proof", "Proving", "prove"]

# A proof takes one to three seconds; a slow machine that does several things at once gets what it needs. Seconds.
PEER_SECONDS = 20.0
# For a checkpoint of one's own, for whose proof nobody else waits. Seconds.
OWN_SECONDS = 60.0
# The miniature and its copies take less than 1 GiB, the modules of a model of 1,024 layers some hundred MB. Bytes.
MAX_BYTES = 2 * 1024**3

_MAX_KEPT = 32


@dataclass(frozen=True, slots=True)
class Proof:
    """The facts of a config that is proven.

    Attributes:
        traits: what generation has to know of the model.
        why_no_images: of a model that takes images, why it is served without; empty where it sees them as the whole
            model does, or takes none.
        costs: bytes of each layer, in `dtype`.
        dtype: what stages compute in.
    """

    traits: SplitTraits
    costs: tuple[LayerCost, ...]
    dtype: torch.dtype
    why_no_images: str = ""


def prove(
    config: Mapping[str, object],
    dtype: str | None,
    quantization: Mapping[str, object] | None = None,
    image_config: Mapping[str, object] | None = None,
) -> Proof:
    """Build and split what `config` (a config.json, of any origin) describes, in this process and without limits.

    Args:
        dtype: to compute in; None for the checkpoint's own.
        quantization: the record of what is quantised, of any origin.
        image_config: of the whole model, where `config` is the part of one that takes images.

    Raises:
        UnsupportedModelError: the model cannot be split, transformers does not know it, or nothing here how it is
            quantised.
        ConfigurationError: it cannot be built, or `dtype` is none to compute in.
        CheckpointError: this machine has no room to write it down.
    """
    try:
        built = build_config(config)
        compute_dtype = resolve_dtype(built, dtype)
        traits = check_splittable(built)
        record = Quantization.from_record(quantization)
        if record is not None:
            check_experts(built, record)
        costs = layer_cost(built, compute_dtype, record)
        # As its user will: its tables and buffers are made.
        Stage(built, dtype=compute_dtype, device="cpu")
        why_no_images = "" if image_config is None else _why_no_images(image_config)
    except NeuroGridError:
        raise
    except Exception as exc:  # whatever a model's code may raise on what makes no sense
        raise ConfigurationError(
            f"the model cannot be built: {one_line(exc) or type(exc).__name__}"
        ) from exc
    return Proof(traits, costs, compute_dtype, why_no_images)


def _why_no_images(config: Mapping[str, object]) -> str:
    try:
        check_images(config)
    except UnsupportedModelError as exc:
        return str(exc)
    return ""


class Proving:
    """One proof in a child process. `result` blocks; `close`, from another thread, ends it at once.

    Args: as for `prove`.

    Raises:
        UnsupportedModelError: the config is over a bound of sanitize.py.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        dtype: str | None,
        quantization: Mapping[str, object] | None = None,
        image_config: Mapping[str, object] | None = None,
    ) -> None:
        self._argument = {
            "config": config,
            "dtype": dtype,
            "quantization": quantization,
            "image_config": image_config,
        }
        self._key = (
            config_fingerprint(config),
            dtype,
            Quantization.from_record(quantization),
            None if image_config is None else config_fingerprint(image_config),
        )
        self._process = ConfinedProcess(_prove_in_child, Limits(MAX_BYTES, int(OWN_SECONDS)))

    def result(self, *, seconds: float) -> Proof:
        """The proof, or what was found when the same config was tried before.

        Raises:
            UnsupportedModelError, ConfigurationError, CheckpointError: as `prove`. The last says nothing of the config,
                and the next call tries it again.
            ConfinementError: it was not done within `seconds`, or takes more than the limits; says which.
        """
        kept = _kept.get(self._key)
        if kept is None:
            try:
                kept = _read(self._process.call(self._argument, seconds=seconds))
            except ConfinementError as exc:
                raise ConfinementError(
                    f"the model's config is refused, its trial was given up: {exc}"
                ) from exc
            except (UnsupportedModelError, ConfigurationError) as exc:
                kept = type(exc), str(exc)
            finally:
                self._process.close()
            with _keeping:
                while len(_kept) >= _MAX_KEPT:
                    del _kept[next(iter(_kept))]
                _kept[self._key] = kept
        if isinstance(kept, Proof):
            return kept
        error, text = kept
        raise error(text)

    def close(self) -> None:
        """Give it up, if it is under way."""
        self._process.close()


# By fingerprint, dtype, quantisation, and fingerprint of the whole where it takes images: the proof, or the error that
# was its end.
_kept: dict[
    tuple[bytes, str | None, Quantization | None, bytes | None],
    Proof | tuple[type[NeuroGridError], str],
] = {}
_keeping = threading.Lock()


def _prove_in_child(argument: Mapping[str, Any]) -> dict[str, Any]:
    """`prove`, with what JSON has."""
    proof = prove(
        argument["config"], argument["dtype"], argument["quantization"], argument["image_config"]
    )
    return {
        "traits": asdict(proof.traits),
        "costs": [asdict(cost) for cost in proof.costs],
        "dtype": str(proof.dtype).removeprefix("torch."),
        "why_no_images": proof.why_no_images,
    }


def _read(result: Mapping[str, Any]) -> Proof:
    traits = dict(result["traits"])
    if traits["row_bounds"] is not None:
        traits["row_bounds"] = tuple(traits["row_bounds"])
    return Proof(
        SplitTraits(**traits),
        tuple(LayerCost(**cost) for cost in result["costs"]),
        COMPUTE_DTYPES[result["dtype"]],
        result["why_no_images"],
    )
