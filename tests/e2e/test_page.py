"""The page, in headless Chromium, against real processes: chat, stop, a kill and its recovery; on a phone, in the dark.

Screenshots go to the directory that NEUROGRID_SCREENSHOTS names, or to build/screenshots. More than 600 lines,
since all of it shares one server and one browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.planner import Plan, PlannedStage
from tests.e2e.page_server import serve_page
from tests.e2e.preloaded import COORDINATOR, Popen
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.image_models import png, some_image
from tests.ports import free_port
from tests.unit.test_status import FakeFleet, FakeMember, info

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = Path(
    os.environ.get("NEUROGRID_SCREENSHOTS") or Path(__file__).parents[2] / "build" / "screenshots"
)
# For what a page does; the machines are slow at times.
MILLISECONDS = 90_000
DESKTOP = {"width": 1360, "height": 900}
PHONE = {"width": 360, "height": 740}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")


@dataclass
class Cluster:
    """A coordinator that serves, and its three workers: two stages, and one that stands by."""

    url: str
    workers: list[WorkerProcess]
    coordinator: Popen


@dataclass
class Watched:
    """A page, and what must not happen on it.

    Attributes:
        faults: what its console said, errors that nobody caught, requests that went elsewhere.
    """

    page: sync_api.Page
    host: str
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._on_request)
        self.page.set_default_timeout(MILLISECONDS)
        sync_api.expect.set_options(timeout=MILLISECONDS)

    def _on_console(self, message: sync_api.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _on_request(self, request: sync_api.Request) -> None:
        if urlsplit(request.url).netloc != self.host:
            self.faults.append(f"request to {request.url}")

    def shoot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("page")
    with ExitStack() as stack:
        log = stack.enter_context((directory / "coordinator.log").open("w"))
        with ThreadPoolExecutor() as pool:
            places = [directory / str(number) for number in range(3)]
            for place in places:
                place.mkdir()
            starting = [start_worker(place, "--memory-limit", "512MiB") for place in places]
            workers = list(pool.map(stack.enter_context, starting))
        peers = [argument for worker in workers for argument in ("--peer", worker.address)]
        coordinator = Popen(
            [
                *(*COORDINATOR, "--http-port", "0", "--no-cache", *peers),
                *("--listen", "/ip4/127.0.0.1/tcp/0", "--stages", "2", "--max-sessions", "4"),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert coordinator.stdout is not None
        try:
            url = coordinator.stdout.readline().strip()
            assert url, (directory / "coordinator.log").read_text()
            yield Cluster(url, workers, coordinator)
        finally:
            coordinator.terminate()
            coordinator.wait(DEADLINE)
            coordinator.stdout.close()
            for worker in workers:
                worker.kill()  # nobody needs their farewell


def open_page(
    stack: ExitStack,
    browser: sync_api.Browser,
    url: str,
    *,
    viewport: dict[str, int] = DESKTOP,
    **options: object,
) -> Watched:
    context = browser.new_context(viewport=viewport, **options)
    stack.callback(context.close)
    watched = Watched(context.new_page(), urlsplit(url).netloc)
    watched.page.goto(url)
    return watched


@pytest.fixture
def watched(browser: sync_api.Browser, cluster: Cluster) -> Iterator[Watched]:
    """The page on a desktop, ready; nothing may have gone wrong on it at the end."""
    with ExitStack() as stack:
        watched = open_page(stack, browser, cluster.url, color_scheme="light")
        sync_api.expect(watched.page.locator("#phase-text")).to_have_text("Ready")
        yield watched
        assert watched.faults == []


def answer_with(
    page: sync_api.Page, *texts: str | list[dict[str, object]]
) -> list[dict[str, object]]:
    """Have each request for an answer answered by the next of these: a text, or deltas. Returns what is asked."""
    asked: list[dict[str, object]] = []
    left = list(texts)

    def answer(route: sync_api.Route) -> None:
        asked.append(route.request.post_data_json)
        text = left.pop(0)
        if isinstance(text, str):
            pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
            text = [{"content": piece} for piece in pieces]
        chunks = [{"choices": [{"delta": delta}]} for delta in text]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    return asked


MARKDOWN = """\
# A title

Some **bold**, *slanted* and `code` &lt;here&gt;, [a link](https://example.org/page) and
[no link](javascript:alert(1)), ![a picture](https://example.org/x.png).

1. one
   - inner
2. two

| name | size |
|---|--:|
| a | 10 |

> said <img src=x onerror=alert(1)>

<script>alert(1)</script>

```python
def f(x: int) -> int:
    return x < 3
```
"""


def answers(page: sync_api.Page) -> sync_api.Locator:
    return page.locator(".message.assistant .text")


def ask(page: sync_api.Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def make_known_and_long(page: sync_api.Page) -> None:
    """Have answers that are the same each time, and last while a slow browser looks at what goes on meanwhile."""
    page.locator("#settings-button").click()
    page.locator("#temperature").fill("0")
    page.locator("#max-tokens").fill("1000")
    page.keyboard.press("Escape")


def wait_text(page: sync_api.Page, num_chars: int) -> str:
    """What has been written, once it is as long as that."""
    page.wait_for_function(
        "n => (document.querySelector('.message.assistant:last-child .text')?.textContent.length ?? 0) >= n",
        arg=num_chars,
    )
    return answers(page).last.text_content() or ""


def test_it_shows_the_cluster(watched: Watched, cluster: Cluster) -> None:
    page = watched.page
    sync_api.expect(page.locator("#model")).to_have_text("embedded")
    sync_api.expect(page.locator(".worker[data-health=ready]")).to_have_count(3)
    sync_api.expect(page.locator(".worker[data-role=stage]")).to_have_count(2)
    sync_api.expect(page.locator(".worker[data-role=replica]")).to_have_count(1)
    shown = page.locator(".worker").evaluate_all("all => all.map((one) => one.dataset.peer)")
    assert set(shown) == {worker.peer_id for worker in cluster.workers}
    picture = page.locator("#picture")
    sync_api.expect(picture.locator(".node.stage")).to_have_count(2)
    sync_api.expect(picture.locator(".node.standby")).to_have_count(1)
    sync_api.expect(picture).to_have_attribute("aria-label", re.compile("stage 1, layers 0.3"))
    sync_api.expect(page.locator("#log")).to_contain_text("Planned 8 layers in 2 stages")
    watched.shoot("desktop-light")


def test_it_streams_an_answer_and_stops_when_told_to(watched: Watched) -> None:
    page = watched.page
    make_known_and_long(page)
    ask(page, "A function definition")
    sync_api.expect(page.locator("#composer")).to_have_class(re.compile("is-busy"))
    first = wait_text(page, 20)
    sync_api.expect(page.locator(".flow.is-on").first).to_be_attached()
    later = wait_text(page, len(first) + 40)
    assert later.startswith(first)
    assert "function" in later
    watched.shoot("generating-light")
    page.locator("#send").click()
    sync_api.expect(page.locator(".message-note")).to_contain_text("stopped")
    sync_api.expect(page.locator("#sessions")).to_have_text("0")
    sync_api.expect(page.locator("#composer")).not_to_have_class(re.compile("is-busy"))
    text = wait_text(page, 1)
    page.wait_for_timeout(300)
    assert wait_text(page, 1) == text
    sync_api.expect(page.locator("#first-token")).not_to_have_text(re.compile("^\\W$"))
    # How long a token took each stage, of which the picture and the list tell the same.
    told = re.compile(r"(^| · )\d\S* (µs|ms|s) a token$")
    sync_api.expect(page.locator("#picture .node.stage .node-note")).to_have_text([told, told])
    roles = page.locator(".worker[data-role=stage] .worker-role")
    sync_api.expect(roles).to_have_text([told, told])
    watched.shoot("steps-light")
    page.locator("#new-chat").click()
    sync_api.expect(page.locator(".message")).to_have_count(0)
    sync_api.expect(page.locator("#prompt")).to_be_focused()


def test_markup_is_text(watched: Watched) -> None:
    page = watched.page
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    sync_api.expect(page.locator(".message.user .text")).to_have_text(
        "<img src=x onerror=alert(1)><b>bold</b>"
    )
    assert page.locator("#messages img, #messages b").count() == 0
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#composer")).not_to_have_class(re.compile("is-busy"))


def test_markdown_is_elements_and_nothing_else(browser: sync_api.Browser) -> None:
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url, color_scheme="light")
        page = watched.page
        answer_with(page, MARKDOWN, "> " * 5000 + "deep", "x" * 250_000)
        ask(page, "Show me")
        sync_api.expect(page.locator("#composer")).not_to_have_class(re.compile("is-busy"))
        text = answers(page)
        sync_api.expect(text.locator("h3")).to_have_text("A title")
        sync_api.expect(text.locator("strong")).to_have_text("bold")
        sync_api.expect(text.locator("em")).to_have_text("slanted")
        sync_api.expect(text.locator("p").first).to_contain_text("code <here>")
        sync_api.expect(text.locator("ol > li")).to_have_count(2)
        sync_api.expect(text.locator("ol ul li")).to_have_text("inner")
        sync_api.expect(text.locator("td.is-right")).to_have_text("10")
        code = "def f(x: int) -> int:\n    return x < 3"
        sync_api.expect(text.locator("pre code")).to_have_text(code)
        # What would be markup, or lead anywhere but to a page, stands there as it was written.
        sync_api.expect(text.locator("blockquote")).to_have_text(
            "said <img src=x onerror=alert(1)>"
        )
        sync_api.expect(text).to_contain_text("<script>alert(1)</script>")
        sync_api.expect(text).to_contain_text("[no link](javascript:alert(1))")
        assert text.locator("img, script, iframe, [onerror]").count() == 0
        leads = text.locator("a").evaluate_all("all => all.map((one) => [one.href, one.rel])")
        rel = "noopener noreferrer nofollow"
        assert leads == [["https://example.org/page", rel], ["https://example.org/x.png", rel]]
        watched.shoot("markdown-light")
        # Deep and long texts are shown as they stand.
        for number, words in enumerate(("deep", "xxxx")):
            ask(page, "More")
            last = page.locator(".message.assistant").nth(number + 1)
            sync_api.expect(last.locator(".text")).to_contain_text(words)
            sync_api.expect(last.locator(".message-note .copy")).to_be_visible()
        assert watched.faults == []


def test_a_chat_survives_reloading_and_is_written_anew(browser: sync_api.Browser) -> None:
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url)
        page = watched.page
        asked = answer_with(page, "The *first* answer", "Another answer", "A second one")
        page.locator("#settings-button").click()
        page.locator("#system-prompt").fill("Be brief.")
        page.keyboard.press("Escape")
        ask(page, "A question")
        sync_api.expect(answers(page)).to_have_text("The first answer")
        system = {"role": "system", "content": "Be brief."}
        question = {"role": "user", "content": "A question"}
        assert asked[-1]["messages"] == [system, question]
        page.reload()
        sync_api.expect(answers(page).locator("em")).to_have_text("first")
        sync_api.expect(page.locator(".message.user")).to_have_text("A question")
        sync_api.expect(page.locator("#welcome")).to_be_hidden()
        page.get_by_role("button", name="Write it anew").click()
        sync_api.expect(answers(page)).to_have_text("Another answer")
        assert asked[-1]["messages"] == [system, question]
        ask(page, "And then?")
        sync_api.expect(answers(page).last).to_have_text("A second one")
        sync_api.expect(page.get_by_role("button", name="Write it anew")).to_have_count(1)
        said = {"role": "assistant", "content": "Another answer"}
        assert asked[-1]["messages"] == [
            system,
            question,
            said,
            {"role": "user", "content": "And then?"},
        ]
        page.reload()
        sync_api.expect(answers(page)).to_have_text(["Another answer", "A second one"])
        # Another tab has its own, and what is begun anew is forgotten.
        other = page.context.new_page()
        other.goto(server.url)
        sync_api.expect(other.locator("#welcome")).to_be_visible()
        sync_api.expect(other.locator(".message")).to_have_count(0)
        page.locator("#new-chat").click()
        page.reload()
        sync_api.expect(page.locator("#welcome")).to_be_visible()
        assert watched.faults == []


def test_conversations_of_before_are_kept_exported_and_deleted(browser: sync_api.Browser) -> None:
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url, color_scheme="light")
        page = watched.page
        answer_with(page, "The *first* answer", "A second one")
        ask(page, "A question")
        sync_api.expect(answers(page)).to_have_text("The first answer")
        sync_api.expect(page.get_by_role("button", name="Write it anew")).to_be_visible()
        page.locator("#new-chat").click()
        ask(page, "Another <b>question</b>")
        sync_api.expect(answers(page)).to_have_text("A second one")
        sync_api.expect(page.get_by_role("button", name="Write it anew")).to_be_visible()
        page.locator("#history-button").click()
        shown = page.locator(".conversation")
        sync_api.expect(shown).to_have_count(2)
        sync_api.expect(shown.first).to_contain_text("Another <b>question</b>")
        sync_api.expect(shown.first).to_have_attribute("aria-current", "true")
        watched.shoot("history-light")
        with page.expect_download() as markdown:
            page.locator("#export-markdown").click()
        assert markdown.value.suggested_filename == "another-b-question-b.md"
        assert markdown.value.path().read_text() == (
            "# Another <b>question</b>\n\n## You\n\nAnother <b>question</b>\n\n## Answer\n\nA second one\n"
        )
        with page.expect_download() as exported:
            page.locator("#export-json").click()
        assert json.loads(exported.value.path().read_text()) == {
            "messages": [
                {"role": "user", "content": "Another <b>question</b>"},
                {"role": "assistant", "content": "A second one"},
            ]
        }
        shown.last.click()
        sync_api.expect(answers(page).locator("em")).to_have_text("first")
        sync_api.expect(page.locator(".message.user")).to_have_text("A question")
        # Another tab finds them, and what is deleted there is gone.
        other = page.context.new_page()
        other.goto(server.url)
        other.locator("#history-button").click()
        sync_api.expect(other.locator(".conversation")).to_have_count(2)
        other.get_by_role("button", name="Delete: A question").click()
        sync_api.expect(other.locator(".conversation")).to_have_count(1)
        page.locator("#settings-button").click()
        page.locator("#keeps-history").uncheck()
        page.keyboard.press("Escape")
        page.locator("#history-button").click()
        sync_api.expect(page.locator(".conversation")).to_have_count(0)
        sync_api.expect(page.locator("#no-conversations")).to_have_text(
            "None are kept: Settings say so."
        )
        assert watched.faults == []


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_calls_of_tools_are_shown_and_answered(browser: sync_api.Browser) -> None:
    def call(index: int, city: str) -> list[dict[str, object]]:
        told = {"index": index, "id": f"call_{index}", "type": "function"}
        return [
            {"tool_calls": [{**told, "function": {"name": "weather", "arguments": ""}}]},
            {"tool_calls": [{"index": index, "function": {"arguments": '{"city":'}}]},
            {"tool_calls": [{"index": index, "function": {"arguments": f'"{city}"}}'}}]},
        ]

    thoughts = [{"reasoning_content": "They want "}, {"reasoning_content": "two cities."}]
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url, color_scheme="light")
        page = watched.page
        asked = answer_with(
            page, [*thoughts, *call(0, "Bern"), *call(1, "Rome")], "Bern is **dry**, Rome is not."
        )
        page.locator("#settings-button").click()
        page.locator("#tools").fill("[{]")
        page.get_by_role("button", name="Done").click()
        sync_api.expect(page.locator("#settings")).to_be_visible()  # that is no list
        page.locator("#tools").fill(json.dumps(TOOLS))
        page.get_by_role("button", name="Done").click()
        sync_api.expect(page.locator("#settings")).to_be_hidden()
        ask(page, "Where does it rain?")
        calls = page.locator(".call")
        sync_api.expect(calls).to_have_count(2)
        sync_api.expect(calls.first.locator("code")).to_have_text('{\n  "city": "Bern"\n}')
        sync_api.expect(page.locator(".thoughts-text")).to_have_text("They want two cities.")
        assert asked[-1]["tools"] == TOOLS
        sync_api.expect(page.locator("#prompt")).to_have_attribute(
            "placeholder", "What weather gives"
        )
        ask(page, "sun")
        sync_api.expect(page.locator(".message.tool")).to_have_count(1)
        page.reload()  # in the middle of what is given
        sync_api.expect(page.locator(".call")).to_have_count(2)
        ask(page, "rain")
        sync_api.expect(answers(page).last.locator("strong")).to_have_text("dry")
        watched.shoot("tools-light")
        question, called, first, second = asked[-1]["messages"]
        assert question == {"role": "user", "content": "Where does it rain?"}
        assert called["content"] is None
        assert called["tool_calls"][1]["function"] == {
            "name": "weather",
            "arguments": '{"city":"Rome"}',
        }
        assert first == {"role": "tool", "tool_call_id": "call_0", "content": "sun"}
        assert second == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        sync_api.expect(page.locator("#prompt")).to_have_attribute("placeholder", "Write a message")
        assert watched.faults == []


def test_images_are_attached_where_the_model_takes_them(browser: sync_api.Browser) -> None:
    """Chosen, pasted and dropped; shown, sent, and there again when the page is loaded anew."""
    data = png(some_image(1))
    file = {"name": "noise.png", "mimeType": "image/png", "buffer": data}
    with ExitStack() as stack, serve_page(transferring(), takes_images=True) as server:
        watched = open_page(stack, browser, server.url, color_scheme="light")
        page = watched.page
        asked = answer_with(page, "Noise", "More noise")
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Add an image").click()
        chooser.value.set_files([file, {**file, "name": "other.png"}])
        sync_api.expect(page.locator("#attached img")).to_have_count(2)
        page.get_by_role("button", name="Leave out: Image 2").click()
        sync_api.expect(page.locator("#attached img")).to_have_count(1)
        page.locator("#attach-file").set_input_files(
            {**file, "mimeType": "text/plain", "name": "a.txt"}
        )
        sync_api.expect(page.locator("#attached-note")).to_contain_text("a.txt is no image")
        ask(page, "What is this?")
        sync_api.expect(answers(page)).to_have_text("Noise")
        url = "data:image/png;base64," + b64encode(data).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        message = {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
        assert asked[-1]["messages"] == [message]
        sync_api.expect(page.locator(".message.user img")).to_have_attribute("src", url)
        sync_api.expect(page.locator("#attached")).to_be_hidden()
        watched.shoot("images")
        page.reload()
        sync_api.expect(page.locator(".message.user img")).to_have_attribute("src", url)
        # As a browser does when somebody pastes, or lets go of a file above the page; and sent without a word.
        for kind, where in (("paste", "#prompt"), ("drop", "#chat")):
            page.evaluate(
                """([kind, where, bytes]) => {
                    const data = new DataTransfer();
                    data.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
                    const carried = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
                    const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
                    document.querySelector(where).dispatchEvent(
                        new Kind(kind, { ...carried, bubbles: true, cancelable: true }));
                }""",
                [kind, where, list(data)],
            )
        sync_api.expect(page.locator("#attached img")).to_have_count(2)
        page.locator("#send").click()
        sync_api.expect(answers(page).last).to_have_text("More noise")
        assert asked[-1]["messages"][-1] == {"role": "user", "content": [image, image]}
        assert watched.faults == []
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url)
        sync_api.expect(watched.page.locator("#suggestions li").first).to_be_visible()
        sync_api.expect(watched.page.locator("#attach")).to_be_hidden()


def test_an_adapter_is_chosen_where_there_are_some(browser: sync_api.Browser) -> None:
    models = ("a-model", "law", "verse")
    with ExitStack() as stack, serve_page(transferring(), models=models) as server:
        watched = open_page(stack, browser, server.url)
        page = watched.page
        asked = answer_with(page, "One", "Two")
        choice = page.locator("#model-choice")
        sync_api.expect(choice.locator("option")).to_have_text(list(models))
        choice.select_option("verse")
        ask(page, "A question")
        sync_api.expect(answers(page)).to_have_text("One")
        assert asked[-1]["model"] == "verse"
        page.reload()
        sync_api.expect(choice).to_have_value("verse")
        assert watched.faults == []


def test_the_cluster_is_that_of_the_model_that_is_chosen(browser: sync_api.Browser) -> None:
    with ExitStack() as stack, serve_page(transferring(), models=("one", "other")) as server:
        watched = open_page(stack, browser, server.url)
        page = watched.page
        choice = page.locator("#model-choice")
        sync_api.expect(choice.locator("option")).to_have_text(["one", "other"])
        with page.expect_request("**/v1/cluster/events?model=other"):
            choice.select_option("other")
        sync_api.expect(page.locator("#lost")).to_be_hidden()
        assert watched.faults == []


def test_it_says_why_nothing_comes(browser: sync_api.Browser) -> None:
    reasons = (
        (transferring(), "Weights are on their way: 4.0 GB of 10.0 GB"),
        (many(2), "Reading what was said so far"),
    )
    for board, reason in reasons:
        with ExitStack() as stack, serve_page(board) as server:
            page = open_page(stack, browser, server.url).page
            page.route("**/v1/chat/completions", lambda route: None)  # an answer that does not come
            ask(page, "A question")
            note = page.locator(".message-note")
            sync_api.expect(note).to_contain_text(reason)
            page.keyboard.press("Escape")
            sync_api.expect(note).to_contain_text("stopped")


def test_settings_are_kept(watched: Watched) -> None:
    page = watched.page
    page.locator("#settings-button").press("Enter")
    page.locator("#max-tokens").fill("7")
    page.locator("#temperature").fill("0")
    page.keyboard.press("Escape")
    page.reload()
    sync_api.expect(page.locator(".suggestion").first).to_be_visible()
    page.locator(".suggestion").first.click()
    sync_api.expect(page.locator(".message-note")).to_contain_text("7 tokens")


def test_a_text_is_continued_where_there_is_no_chat_template(
    browser: sync_api.Browser, cluster: Cluster
) -> None:
    refused = {"error": {"message": "this model has no chat template", "code": "chat_template"}}
    with ExitStack() as stack:
        watched = open_page(stack, browser, cluster.url)
        page = watched.page
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=400, json=refused),  # this model has one
        )
        # A text that is drawn may end by itself, before anybody stops it.
        page.locator("#settings-button").press("Enter")
        page.locator("#temperature").fill("0")
        page.keyboard.press("Escape")
        ask(page, "A function definition")
        sync_api.expect(page.locator(".message-note")).to_contain_text("no chat template")
        page.get_by_role("button", name="Let it continue the text").click()
        assert len(wait_text(page, 20)) >= 20
        page.keyboard.press("Escape")
        sync_api.expect(page.locator(".message-note")).to_contain_text("stopped")


def test_a_phone_in_the_dark(browser: sync_api.Browser, cluster: Cluster) -> None:
    with ExitStack() as stack:
        watched = open_page(
            stack,
            browser,
            cluster.url,
            viewport=PHONE,
            color_scheme="dark",
            has_touch=True,
            is_mobile=True,
        )
        page = watched.page
        sync_api.expect(page.locator("#phase-text")).to_have_text("Ready")
        sync_api.expect(page.locator("#cluster")).to_be_hidden()
        watched.shoot("phone-dark-chat")
        page.locator("#tab-chat").focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator("#cluster")).to_be_visible()
        sync_api.expect(page.locator("#chat")).to_be_hidden()
        sync_api.expect(page.locator(".worker")).to_have_count(3)
        watched.shoot("phone-dark-cluster")
        for view in ("chat", "cluster"):
            page.locator(f"#tab-{view}").click()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        assert page.evaluate(luminance) < 60
        page.locator("#theme").click()
        assert page.evaluate(luminance) > 200
        assert watched.faults == []


def test_a_killed_worker_and_what_is_done_about_it(watched: Watched, cluster: Cluster) -> None:
    """The last of these tests on the cluster: it has a worker less from here on."""
    page = watched.page
    # Ready is told before the third worker has its layers; what is done about a kill differs until then.
    sync_api.expect(page.locator("#log")).to_contain_text("stands by with layers")
    number_one = page.locator(".worker[data-role=stage]").first.get_attribute("data-peer")
    victim = next(worker for worker in cluster.workers if worker.peer_id == number_one)
    make_known_and_long(page)
    ask(page, "The with statement")
    before = wait_text(page, 30)
    victim.kill()
    lost = page.locator(f".worker[data-peer='{victim.peer_id}']")
    sync_api.expect(lost).to_have_attribute("data-health", "lost")
    sync_api.expect(page.locator("#notice")).to_contain_text("stood by")
    sync_api.expect(page.locator("#picture .is-lost")).to_have_count(1)
    watched.shoot("after-a-kill-light")
    sync_api.expect(page.locator("#log")).to_contain_text("goes on with other workers")
    assert wait_text(page, len(before) + 200).startswith(before)
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#phase-text")).to_have_text("Ready")
    sync_api.expect(page.locator(".worker[data-role=stage][data-health=ready]")).to_have_count(2)


# ---------------------------------------------------------------- what a test tells


def transferring() -> StatusBoard:
    """Three workers, one of which has its layers, one half of them, and one hardly any."""
    board, fleet = StatusBoard(), FakeFleet()
    layers = [range(12), range(12, 22), range(22, 32)]
    stages = [
        PlannedStage(name, part.start, part.stop, 4_000_000_000)
        for name, part in zip(("first", "second", "third"), layers, strict=True)
    ]
    fleet.plan = Plan(tuple(stages))
    fleet.members = [FakeMember(stage.peer_id, info(stage.peer_id)) for stage in stages]
    board.listening("coordinator", [])
    board.model_read("Qwen3-8B", 32)
    board.formed(fleet, TrafficCounters())
    board.planned(fleet.plan, [member.info for member in fleet.members], 32)
    for member, part, done in zip(fleet.members, layers, (1.0, 0.6, 0.1), strict=True):
        member.is_placing, member.assigned = done < 1, part
        board.transfer_planned(member.peer_id, 5_000_000_000)
        board.already_held(member.peer_id, 400_000_000)
        board.transferred(member.peer_id, int(4_600_000_000 * done))
    fleet.members[0].layers = layers[0]
    return board


def test_weights_on_their_way(browser: sync_api.Browser) -> None:
    with ExitStack() as stack, serve_page(transferring()) as server:
        watched = open_page(stack, browser, server.url, color_scheme="light")
        page = watched.page
        sync_api.expect(page.locator("#phase-text")).to_have_text("Sending weights")
        bars = page.locator(".worker .transfer [role=progressbar]:visible")
        sync_api.expect(bars).to_have_count(2)
        sync_api.expect(bars.first).to_have_attribute("aria-valuenow", "63")
        sync_api.expect(page.locator(".transfer-text").nth(1)).to_contain_text("3.2 GB of 5.0 GB")
        sync_api.expect(page.locator(".centre")).to_have_text("60 %")
        watched.shoot("transfer-light")
        sync_api.expect(page.locator("#picture .is-receiving")).to_have_count(2)
        assert watched.faults == []


def many(num_stages: int) -> StatusBoard:
    """As many stages of one layer, and as many workers that have nothing."""
    board, fleet = StatusBoard(), FakeFleet()
    stages = [PlannedStage(f"stage{n}", n, n + 1, 1000) for n in range(num_stages)]
    fleet.plan = Plan(tuple(stages))
    fleet.members = [
        FakeMember(stage.peer_id, info(stage.peer_id), range(stage.start, stage.stop))
        for stage in stages
    ]
    fleet.members += [FakeMember(f"spare{n}", info(f"spare{n}")) for n in range(num_stages)]
    board.formed(fleet, TrafficCounters())
    board.planned(fleet.plan, [], num_stages)
    board.ready()
    return board


@pytest.mark.parametrize("num_stages", [1, 9, 60])
def test_few_and_many_stages(browser: sync_api.Browser, num_stages: int) -> None:
    with ExitStack() as stack, serve_page(many(num_stages)) as server:
        watched = open_page(stack, browser, server.url, color_scheme="dark")
        page = watched.page
        sync_api.expect(page.locator(".worker")).to_have_count(2 * num_stages)
        sync_api.expect(page.locator("#picture .node.stage")).to_have_count(num_stages)
        watched.shoot(f"stages-{num_stages}-dark")
        assert watched.faults == []


def test_a_key_is_asked_for(browser: sync_api.Browser) -> None:
    key = "a-key-of-twenty-chars"
    with ExitStack() as stack, serve_page(transferring(), keys=(key,)) as server:
        watched = open_page(stack, browser, server.url)
        page = watched.page
        page.locator("#key-input").fill("a wrong one")
        page.locator("#key-input").press("Enter")
        sync_api.expect(page.locator("#key-dialog")).to_be_visible()
        sync_api.expect(page.locator("#key-input")).to_have_value("")
        page.locator("#key-input").fill(key)
        page.locator("#key-input").press("Enter")
        sync_api.expect(page.locator(".worker")).to_have_count(3)
        # The browser itself reports the two refused requests, and nothing else went wrong.
        assert all("401" in fault for fault in watched.faults)


def test_a_lost_connection_comes_back(browser: sync_api.Browser) -> None:
    with ExitStack() as stack:
        with serve_page(transferring(), port=free_port()) as server:
            watched = open_page(stack, browser, server.url)
            sync_api.expect(watched.page.locator(".worker")).to_have_count(3)
        banner = watched.page.locator("#lost")
        sync_api.expect(banner).to_contain_text("No connection to the coordinator")
        with serve_page(transferring(), port=server.port):
            sync_api.expect(banner).to_be_hidden()
            sync_api.expect(watched.page.locator("#phase-text")).to_have_text("Sending weights")
