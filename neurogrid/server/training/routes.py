"""`/v1/training/*`: what is known of a training run.

    /v1/training/status        how it stands: members, the last rounds, alarms, what happened
    /v1/training/metrics       its figures, step by step
    /v1/training/journal       the last entries of its journal
    /v1/training/checkpoints   what was written
    /v1/training/verify        whether it learns
    /v1/training/global        where its figures go, who has the same weights, what members are worth

Everything is read: nothing here changes the run.
"""

from __future__ import annotations

import math
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from neurogrid.fleet.board.status import Json, to_json
from neurogrid.server.errors import APIError
from neurogrid.server.openapi import Paths, json_answer, operation
from neurogrid.training.leading.board import MAX_FIGURES, RunBoard
from neurogrid.training.leading.status import RunStatus
from neurogrid.training.runs.tracker import CONFIDENCE

__all__ = ["TRAINING_PATHS", "training_global", "training_routes", "training_status"]

MAX_JOURNAL: Final = 1000
"""Entries of the journal in one answer."""

_DEFAULT_JOURNAL: Final = 50
_DEFAULT_FIGURES: Final = 1000

_NUMBER: Final = {"type": ["number", "null"]}
_LINES: Final = {"type": "array", "items": {"type": "object"}}
_STATUS: Final = {
    "type": "object",
    "required": ["name", "run_id", "phase", "round", "step", "tokens", "members", "rounds"],
    "properties": {
        "name": {"type": "string"},
        "run_id": {"type": "string"},
        "phase": {"enum": ["waiting", "training", "finishing", "ended"]},
        "waits": {"type": "string", "description": "Why nothing goes on; empty where it goes on."},
        "round": {"type": "integer", "minimum": 0},
        "step": {"type": "integer", "minimum": 0},
        "tokens": {"type": "integer", "minimum": 0},
        "loss": _NUMBER,
        "eval_loss": _NUMBER,
        "tokens_per_second": _NUMBER,
        "part": {**_NUMBER, "description": "Of the run that is done, 0 to 1."},
        "samples": {"type": ["object", "null"]},
        "is_chain": {
            "type": "boolean",
            "description": "Whether members have a stage each of one model; a round is a step then.",
        },
        "members": _LINES,
        "rounds": _LINES,
        "checkpoints": _LINES,
        "alarms": _LINES,
        "events": _LINES,
        "checks": {
            "type": ["object", "null"],
            "description": "What members computed again of what others claimed; null where they do not.",
            "properties": {
                "num_made": {"type": "integer", "description": "Claims that were computed again."},
                "num_held": {"type": "integer", "description": "Of these, those that hold."},
                "num_open": {"type": "integer", "description": "Accusations that are judged."},
                "num_trials": {"type": "integer", "description": "Peers that are on trial."},
                "last": _LINES,
                "worths": {
                    **_LINES,
                    "description": "What results of members were measured to be worth, by seat.",
                },
            },
        },
    },
}
_METRICS: Final = {
    "type": "object",
    "required": ["metrics", "total"],
    "properties": {
        "metrics": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "total": {"type": "integer", "description": "Lines that there are."},
    },
}
_JOURNAL: Final = {
    "type": "object",
    "required": ["entries"],
    "properties": {"entries": _LINES},
}
_CHECKPOINTS: Final = {
    "type": "object",
    "required": ["checkpoints"],
    "properties": {"checkpoints": _LINES},
}
_MOVING: Final = {
    "type": "object",
    "required": ["latest", "short", "long", "trend"],
    "properties": {
        "latest": _NUMBER,
        "short": {**_NUMBER, "description": "A moving mean over some rounds."},
        "long": {**_NUMBER, "description": "A moving mean over many rounds."},
        "trend": {
            "type": "object",
            "required": ["direction", "num", "change", "low", "high"],
            "properties": {
                "direction": {"enum": ["unknown", "falling", "flat", "rising", "unclear"]},
                "num": {"type": "integer", "description": "Figures that it was taken of."},
                "change": {**_NUMBER, "description": "From the first of these to the last."},
                "low": {**_NUMBER, "description": "It is above this, with the confidence."},
                "high": {**_NUMBER, "description": "It is below this, with the confidence."},
            },
        },
    },
}
_GLOBAL: Final = {
    "type": "object",
    "required": ["round", "loss", "tokens_per_second", "gradient_norm", "agreement", "members"],
    "properties": {
        "round": {"type": "integer", "minimum": 0},
        "step": {"type": "integer", "minimum": 0},
        "tokens": {"type": "integer", "minimum": 0},
        "training_verified": {"type": "boolean"},
        "reason": {"type": "string"},
        "sync_success_rate": _NUMBER,
        "confidence": {"type": "number", "description": "Of the trends, 0 to 1."},
        "loss": _MOVING,
        "eval_loss": _MOVING,
        "tokens_per_second": _MOVING,
        "gradient_norm": _MOVING,
        "agreement": {
            "type": "object",
            "required": ["rate", "num_members", "differing"],
            "properties": {
                "rate": {**_NUMBER, "description": "Of members after the same round."},
                "num_members": {"type": "integer"},
                "differing": _LINES,
            },
        },
        "members": _LINES,
        "bans": {**_LINES, "description": "Of peers that may not take part at the moment."},
        "num_shares": {"type": "integer", "description": "Rounds that a worth is of."},
    },
}
_VERIFY: Final = {
    "type": "object",
    "required": ["training_verified", "reason", "loss_trend", "hash_agreement_rate"],
    "properties": {
        "training_verified": {"type": "boolean"},
        "reason": {"type": "string"},
        "loss_trend": {"enum": ["unknown", "improving", "stable", "worsening"]},
        "first_loss": _NUMBER,
        "loss": _NUMBER,
        "long_loss": _NUMBER,
        "hash_agreement_rate": {**_NUMBER, "description": "Of members after the same round."},
        "num_members": {"type": "integer"},
        "sync_success_rate": _NUMBER,
        "alarms": _LINES,
    },
}


def _integer(name: str, description: str, *, smallest: int, largest: int) -> dict[str, object]:
    return {
        "name": name,
        "in": "query",
        "description": description,
        "schema": {"type": "integer", "minimum": smallest, "maximum": largest},
    }


TRAINING_PATHS: Paths = {
    "/v1/training/status": {
        "get": operation("How the run stands at this moment.", json_answer(_STATUS))
    },
    "/v1/training/metrics": {
        "get": operation(
            "The figures of the run, one object a round.",
            json_answer(_METRICS),
            errors=(400,),
            parameters=(
                _integer("after", "Only of rounds after this one.", smallest=0, largest=2**53),
                _integer("most", "Lines at most, evenly spread.", smallest=2, largest=MAX_FIGURES),
            ),
        )
    },
    "/v1/training/journal": {
        "get": operation(
            "The last entries of the journal, oldest first.",
            json_answer(_JOURNAL),
            errors=(400,),
            parameters=(_integer("most", "Entries.", smallest=1, largest=MAX_JOURNAL),),
        )
    },
    "/v1/training/checkpoints": {
        "get": operation("The last checkpoints that were written.", json_answer(_CHECKPOINTS))
    },
    "/v1/training/verify": {
        "get": operation(
            "Whether the run learns: moving means of the loss, their trend, and the share of members with the same "
            "weights.",
            json_answer(_VERIFY),
        )
    },
    "/v1/training/global": {
        "get": operation(
            "The run in one look: moving means and trends of loss, rate and gradient norms, members with other weights "
            "and since when, and what each member is worth.",
            json_answer(_GLOBAL),
        )
    },
}


def training_routes(board: RunBoard) -> list[BaseRoute]:
    """The routes. They answer before the run has begun, too: with what is known by then."""

    async def status(request: Request) -> JSONResponse:
        return JSONResponse(training_status(board.status()))

    async def metrics(request: Request) -> JSONResponse:
        after = _query(request, "after", 0, smallest=0, largest=2**53)
        most = _query(request, "most", _DEFAULT_FIGURES, smallest=2, largest=MAX_FIGURES)
        lines = [line for line in board.figures if line.get("round", 0) > after or not after]
        return JSONResponse({"metrics": _spread(lines, most), "total": len(lines)})

    async def journal(request: Request) -> JSONResponse:
        most = _query(request, "most", _DEFAULT_JOURNAL, smallest=1, largest=MAX_JOURNAL)
        entries = [
            {"line": each.line, "time": each.time, **each.entry.json()}
            for each in board.journal[-most:]
        ]
        return JSONResponse({"entries": entries})

    async def checkpoints(request: Request) -> JSONResponse:
        return JSONResponse({"checkpoints": to_json(list(board.checkpoints))})

    async def verify(request: Request) -> JSONResponse:
        learning = _finite(to_json(board.learning()))
        assert isinstance(learning, dict)
        return JSONResponse({**learning, "alarms": to_json(list(board.status().alarms))})

    async def as_a_whole(request: Request) -> JSONResponse:
        return JSONResponse(training_global(board))

    return [
        Route("/v1/training/status", status),
        Route("/v1/training/metrics", metrics),
        Route("/v1/training/journal", journal),
        Route("/v1/training/checkpoints", checkpoints),
        Route("/v1/training/verify", verify),
        Route("/v1/training/global", as_a_whole),
    ]


def training_status(status: RunStatus) -> dict[str, Json]:
    """Make the answer of `/v1/training/status`: as `RunStatus` describes it."""
    document = _finite(to_json(status))
    assert isinstance(document, dict)
    return document


def training_global(board: RunBoard) -> dict[str, Json]:
    """Make the answer of `/v1/training/global`: as `TrackedRun` describes it, with how far the run is."""
    status, tracked = board.status(), board.tracked()
    document = _finite(to_json(tracked))
    assert isinstance(document, dict)
    del document["learning"]
    learning = tracked.learning
    return {
        "round": status.round,
        "step": status.step,
        "tokens": status.tokens,
        "training_verified": learning.training_verified,
        "reason": learning.reason,
        "sync_success_rate": learning.sync_success_rate,
        "confidence": CONFIDENCE,
        "bans": [to_json(dict(ban.fields())) for ban in board.bans],
        **document,
    }


def _finite(value: Json) -> Json:
    """JSON has no words for what is not finite: that is not known."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _spread(lines: list[dict[str, float]], most: int) -> list[dict[str, float]]:
    """Choose at most so many lines, evenly spread, the first and the last among them."""
    if len(lines) <= most:
        return lines
    kept = {round(index * (len(lines) - 1) / (most - 1)) for index in range(most)}
    return [line for index, line in enumerate(lines) if index in kept]


def _query(request: Request, name: str, default: int, *, smallest: int, largest: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (
        text.isascii() and text.isdecimal() and len(text) < 20 and smallest <= int(text) <= largest
    ):
        raise APIError(
            400,
            f"{name} is an integer from {smallest} to {largest}",
            param=name,
            code="invalid_value",
        )
    return int(text)
