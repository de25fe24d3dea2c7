"""What a worker asks for training, from its flag to what leaders are offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio

from neurogrid.assembly import training
from neurogrid.cli.commands.worker import build_parser
from neurogrid.training.members import MemberSettings
from neurogrid.worker.settings import WorkerSettings


class Service:
    """Takes part in nothing, and has what it was given."""

    def __init__(self, host: object, settings: MemberSettings, *_: object, **__: object) -> None:
        self.settings = settings
        self.exchange = SimpleNamespace()

    async def run(self) -> None:
        await trio.sleep_forever()


async def test_a_member_asks_what_its_worker_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MemberService", Service)
    any_: Any = None
    for price in (0.0, 2.5):
        settings = WorkerSettings(trains=True, price=price)
        device = torch.device("cpu")
        async with training.open_training(any_, settings, device, "attic", [], any_) as member:
            assert cast(Service, member).settings.price == price


def test_the_flag_is_a_price() -> None:
    assert build_parser().parse_args([]).price == 0
    assert build_parser().parse_args(["--price", "2.5"]).price == 2.5
