"""The page of a training run, in headless Chromium: what it says of a run, on a desktop, on a phone, in the dark.

Screenshots go to the directory that NEUROGRID_SCREENSHOTS names, or to build/screenshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from neurogrid.server.http.guard import Access
from neurogrid.server.training_app import training_app
from neurogrid.telemetry.training_metrics import TrainingMetrics
from neurogrid.training.runs.entries import CheckpointEntry
from tests.e2e.page_server import PageServer, serve
from tests.e2e.test_page import CHROMIUM, DESKTOP, PHONE, SCREENSHOTS, Watched, browser, open_page
from tests.unit.training.test_run_board import RUN_ID, ChainRun, Run

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
KEY = "a key that is long enough"


class Served:
    """A run whose page is served."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self.run = Run()
        self.keys = keys
        self.server: PageServer | None = None

    def serve(self, stack: ExitStack) -> str:
        board = self.run.board
        stack.enter_context(board.watching(self.run.look))
        self.run.join("desk", "laptop")
        for number in range(6):
            self.decide("desk", "laptop", number=number)
        self.decide("desk", number=6)
        self.run.told(CheckpointEntry(step=24, round=6))
        for name in ("desk", "laptop"):
            self.run.report(name, round=7, digest=bytes(32), batch_seconds=0.5, done=7)
        self.run.report("laptop", batches_done=3, batch_seconds=1.0, done=6, round=7)
        registry = TrainingMetrics(board).registry
        app = training_app(board, registry, access=Access(self.keys))
        self.server = stack.enter_context(serve(app))
        return self.server.url

    def decide(self, *names: str, number: int, **more: float) -> None:
        self.run.decide(*names, loss=2 + 3 * math.exp(-number / 3), **more)

    def tell(self, function: Any, *args: Any) -> None:
        """Do this in the thread that serves."""
        assert self.server is not None
        self.server.tell(lambda: function(*args))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def text(watched: Watched, selector: str) -> Any:
    return sync_api.expect(watched.page.locator(selector))


def test_a_run_as_it_is_seen(browser: sync_api.Browser, stack: ExitStack) -> None:
    served = Served()
    watched = open_page(stack, browser, served.serve(stack), color_scheme="light")
    page = watched.page
    text(watched, "#phase-text").to_have_text("Training")
    text(watched, "#name").to_have_text(served.run.board.run_file.name)
    text(watched, "#progress-text").to_contain_text("Round 7 · step 28")
    text(watched, "#loss").to_have_text("2.406")
    text(watched, "#verdict").to_contain_text("It learns")
    text(watched, "#members .worker").to_have_count(2)
    laptop = page.locator('[data-peer="laptop"]')
    sync_api.expect(laptop).to_contain_text("training")
    sync_api.expect(laptop.locator(".facts")).to_contain_text("64")  # tokens a second
    sync_api.expect(laptop.locator(".facts")).to_contain_text("Lease7.5 s")
    text(watched, "#eval-note").to_have_text("not yet")
    text(watched, "#grid tbody tr").to_have_count(2)
    text(watched, "#grid .is-late").to_have_count(1)
    text(watched, "#rounds-body tr").to_have_count(7)
    text(watched, "#rounds-body tr:first-child").to_contain_text("laptop")
    text(watched, "#checkpoints li").to_contain_text("step 24, after round 6")
    text(watched, "#log").to_contain_text("training begins with 2 members")

    # The curves, read by pointer and by keys, against steps and against time.
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    text(watched, "#readout").to_contain_text("step 4 · loss 5.0000")
    page.get_by_role("button", name="Time").click()
    page.locator("#chart").focus()
    page.keyboard.press("End")
    text(watched, "#readout").to_contain_text("after 35 s · loss 2.4060")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "training-light.png")

    # What happens while it is open.
    served.tell(lambda: served.run.report("desk", sent_bytes=3_000_000))
    served.tell(lambda: served.decide("desk", "laptop", number=7, eval_loss=2.75))
    text(watched, "#progress-text").to_contain_text("Round 8")
    text(watched, "#eval-loss").to_have_text("2.750")
    text(watched, "#eval-note").to_have_text("after round 8")
    text(watched, "#rounds-body tr:first-child td:nth-child(4)").to_have_text("2.7500")
    text(watched, "#rounds-body tr:first-child td:nth-child(7)").to_have_text("3.0 MB")
    served.tell(served.run.differing.update, {"desk": 4})
    text(watched, "#whole").to_contain_text("desk has other weights since round 4")
    served.tell(lambda: served.run.report("desk", gradient_norm=0.0))
    text(watched, "#alarms li").to_contain_text("desk learns nothing: its gradient is zero")
    served.tell(served.run.board.warn, "desk is lost: the others go on")
    text(watched, "#log li:first-child").to_contain_text("desk is lost")
    assert watched.faults == []


def test_on_a_phone_and_in_the_dark(browser: sync_api.Browser, stack: ExitStack) -> None:
    served = Served()
    url = served.serve(stack)
    watched = open_page(stack, browser, url, viewport=PHONE, color_scheme="dark")
    page = watched.page
    text(watched, "#rounds-body tr").to_have_count(7)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.querySelector('main').scrollWidth") <= PHONE["width"]
    page.screenshot(path=SCREENSHOTS / "training-phone-dark.png")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert watched.faults == []


def test_a_chain_as_it_is_seen(browser: sync_api.Browser, stack: ExitStack) -> None:
    run = ChainRun()
    stack.enter_context(run.board.watching(run.look))
    app = training_app(run.board, TrainingMetrics(run.board).registry, access=Access(()))
    server = stack.enter_context(serve(app))
    watched = open_page(stack, browser, server.url, color_scheme="light")
    page = watched.page
    text(watched, "#phase-text").to_have_text("waits for members: 0 of 2 are here")
    text(watched, "#no-rounds").to_have_text("No step yet.")

    def begin() -> None:
        run.arrange("laptop", "desk")
        for number in range(7):
            run.step(2 + 3 * math.exp(-number / 3))
        far = {"micro_batches": 16, "done": 4, "under_way": 2}
        run.tell(0, "working", waited=0.25, memory_bytes=2_000_000_000, **far)
        run.tell(1, "working", waited=0.0, memory_bytes=3_000_000_000, micro_batches=16)

    server.tell(begin)
    text(watched, "#phase-text").to_have_text("Training")
    text(watched, "#progress-text").to_contain_text("Step 7 ·")
    text(watched, "#member-title").to_have_text("Stages")
    text(watched, "#round-title").to_have_text("Steps")
    text(watched, "#member-count").to_have_text("2")
    text(watched, "#rate-note").to_have_text("of 2 stages")
    text(watched, "#members .worker").to_have_count(3)
    for peer, facts in {
        "laptop": ("0 to 11", "7", "2", "25 %"),
        "desk": ("12 to 27", "7", "0", "0 %"),
    }.items():
        shown = page.locator(f'[data-peer="{peer}"] .facts > div:visible dd')
        sync_api.expect(shown).to_have_count(6)
        assert shown.all_inner_texts()[:4] == list(facts)
    text(watched, '[data-peer="laptop"] .worker-role').to_have_text(
        "4 of 16 micro-batches of step 8"
    )
    sync_api.expect(page.locator(".stage-head")).to_have_count(0)
    shelf = page.locator('[data-peer="shelf"]')
    sync_api.expect(shelf).to_contain_text("stands by")
    sync_api.expect(shelf.locator(".facts")).to_be_hidden()
    text(watched, "#grid").to_be_hidden()
    text(watched, "#rounds-body tr").to_have_count(7)
    assert page.locator("#round-heads th:visible").all_inner_texts() == [
        *("Step", "Took", "Loss", "Held-out", "Stages", "Waited", "By order")
    ]
    cells = page.locator("#rounds-body tr:first-child td:visible").all_inner_texts()
    assert (cells[:3], cells[4:]) == (["7", "1.5 s", "2.4060"], ["2", "13 %", "6 %"])
    page.screenshot(path=SCREENSHOTS / "training-chain.png")
    server.tell(lambda: run.widen("tower"))
    sync_api.expect(page.locator(".stage-head")).to_have_text(
        ["Stage 1 · layers 0 to 11 · 2 members", "Stage 2 · layers 12 to 27 · 1 member"]
    )
    text(watched, "#member-count").to_have_text("2")
    text(watched, "#rate-note").to_have_text("of 2 stages")
    names = page.locator("#members .worker-name").all_inner_texts()
    assert names == ["laptop", "tower", "desk", "shelf"]
    page.screenshot(path=SCREENSHOTS / "training-wide-chain.png")
    server.tell(lambda: run.tell(2, "failed", reason="no memory left"))
    sync_api.expect(page.locator('[data-peer="desk"]')).to_contain_text("no memory left")
    assert watched.faults == []


def test_a_run_with_a_key_asks_for_it(browser: sync_api.Browser, stack: ExitStack) -> None:
    served = Served(keys=(KEY.replace(" ", "-"),))
    watched = open_page(stack, browser, served.serve(stack), viewport=DESKTOP)
    page = watched.page
    page.locator("#key-input").fill(KEY.replace(" ", "-"))
    page.get_by_role("button", name="Go on").click()
    text(watched, "#phase-text").to_have_text("Training")
    assert served.run.board.status().run_id == RUN_ID.hex()


def test_a_leader_that_is_gone_is_said(browser: sync_api.Browser) -> None:
    with ExitStack() as outer:
        with ExitStack() as stack:
            watched = open_page(outer, browser, Served().serve(stack))
            text(watched, "#phase-text").to_have_text("Training")
        text(watched, "#lost").to_contain_text("No connection to the leader")
        text(watched, "#phase-text").to_have_text("Not connected")
