"""The scripts of the page, in node, without a browser: what is kept of conversations, and what buttons do.

How it looks, and that it works in a browser, is shown by tests/e2e/test_page.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STATIC = Path(__file__).parents[2] / "neurogrid" / "server" / "page" / "static"
BROWSER = Path(__file__).with_name("page_browser.mjs")
NODE = shutil.which("node")
DEADLINE = 60.0

# A chat whose requests get `answers`, in turn: a text, null for a connection that fails, or a status.
CHAT = """
    import { leave } from "./page_browser.mjs";
    import { Chat } from "./chat.js";
    import { History } from "./history.js";
    const asked = [];
    let answers = [];
    globalThis.fetch = async (path, { body }) => {
        asked.push(JSON.parse(body).messages);
        const text = answers.shift();
        if (text === null) throw new TypeError("refused");
        if (typeof text === "number") return new Response("{}", { status: text });
        const delta = JSON.stringify({ choices: [{ delta: { content: text }, finish_reason: "stop" }] });
        return new Response(`data: ${delta}\\n\\ndata: [DONE]\\n\\n`);
    };
    const history = new History();
    const settings = () => ({ temperature: 1, maxTokens: 9, system: "", tools: null });
    const nothing = () => null;
    const nobody = { model: nothing, status: nothing, onKey: nothing, takesImages: nothing };
    const chat = new Chat({ settings, history, ...nobody });
    async function say(text) {
        chat.prompt.value = text;
        chat.submit();
        await ended();
    }
    async function ended() {
        while (chat.running) await new Promise((resolve) => setTimeout(resolve, 1));
    }
    /** The buttons of that name that are to be seen: `.if-last` is hidden behind the last message. */
    function buttons(name) {
        const isShown = (message, button) => message === chat.list.lastChild || !button.classes.has("if-last");
        return chat.list.childNodes.flatMap((message) =>
            message.all.filter((one) => one.name === "button" && one.textContent === name && isShown(message, one)),
        );
    }
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")

Run = Callable[[str], Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script beside those of the page; gives what it `export`s as its default."""
    for script in STATIC.glob("*.js"):
        shutil.copy(script, tmp_path)
    shutil.copy(BROWSER, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run_script(text: str) -> Any:
        (tmp_path / "script.js").write_text(text)
        told = (
            'console.log(JSON.stringify((await import("./script.js")).default)); process.exit(0);'
        )
        command = [str(NODE), "--input-type=module", "--eval", told]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run_script


def test_what_another_tab_deletes_does_not_come_back(run: Run) -> None:
    kept = run("""
        import "./page_browser.mjs";
        import { always } from "./storage.js";
        always.set("conversations", "[1]");
        localStorage.removeItem("neurogrid-conversations");
        export default always.get("conversations", "none");
    """)
    assert kept == "none"


def test_what_the_browser_does_not_keep_holds_until_the_page_is_left(run: Run) -> None:
    kept = run("""
        import { Place } from "./page_browser.mjs";
        import { always } from "./storage.js";
        globalThis.localStorage = new Place(10);
        always.set("a", "short");
        always.set("a", "longer than that");
        const full = always.get("a");
        always.set("a", null);
        const deleted = always.get("a");
        globalThis.localStorage = undefined;
        always.set("b", "there is none");
        export default [full, deleted, always.get("b")];
    """)
    assert kept == ["longer than that", None, "there is none"]


def test_what_one_tab_switches_off_no_other_goes_on_with(run: Run) -> None:
    kept = run("""
        import "./page_browser.mjs";
        import { History } from "./history.js";
        const turns = [{ role: "user", content: "A secret" }];
        const [one, other] = [new History(), new History()];
        one.turn(false);
        other.keep({ id: "a", turns, asText: false });
        const hidden = other.list().length;
        one.turn(true);
        other.keep({ id: "a", turns, asText: false });
        export default [hidden, one.list().length];
    """)
    assert kept == [0, 1]


def test_a_conversation_that_is_too_long_to_be_kept_takes_no_other_along(run: Run) -> None:
    kept = run("""
        import { Place } from "./page_browser.mjs";
        import { History } from "./history.js";
        globalThis.localStorage = new Place(5_000_000);
        const history = new History();
        history.keep({ id: "a", turns: [{ role: "user", content: "Before" }], asText: false });
        const turns = [{ role: "user", content: "What is this?" }];
        history.keep({ id: "b", turns: [...turns], asText: false });
        turns.push({ role: "user", content: "And these?", images: [`data:image/png;base64,${"A".repeat(6_000_000)}`] });
        history.keep({ id: "b", turns, asText: false });
        export default JSON.parse(localStorage.getItem("neurogrid-conversations")).map((one) => one.turns[0].content);
    """)
    assert kept == ["What is this?", "Before"]


def test_what_is_deleted_from_the_history_stays_so_when_the_page_is_left(run: Run) -> None:
    kept = run(
        CHAT
        + """
        answers = ["An answer"];
        await say("A secret");
        const before = history.list().length;
        history.clear();
        leave();
        const tab = JSON.parse(sessionStorage.getItem("neurogrid-chat")).turns.length;
        export default [before, history.list().length, tab];
    """
    )
    assert kept == [1, 0, 2]


def test_an_answer_that_failed_is_asked_for_again_only_while_it_is_the_last(run: Run) -> None:
    turns = run(
        CHAT
        + """
        answers = [null, null, "An answer", "Another"];
        await say("One");
        const [again] = buttons("Try again");
        again.click();
        await ended();
        await say("Two");
        buttons("Try again").forEach((button) => button.click());
        await ended();
        export default [asked.length, chat.turns.map((turn) => turn.content)];
    """
    )
    assert turns == [3, ["One", "Two", "An answer"]]


def test_a_message_has_no_more_images_than_it_may_whatever_way_they_come(run: Run) -> None:
    told = run("""
        import "./page_browser.mjs";
        import { Attachments } from "./attachments.js";
        globalThis.createImageBitmap = (file) => new Promise((resolve) => setTimeout(resolve, 1, file));
        globalThis.FileReader = class extends EventTarget {
            readAsDataURL({ name }) {
                this.result = `data:image/png;base64,${name}`;
                this.dispatchEvent(new Event("load"));
            }
        };
        const files = Array.from({ length: 15 }, (_, index) => ({ type: "image/png", size: 1, name: `${index}` }));
        const attachments = new Attachments(() => true);
        await Promise.all([attachments.add(files.slice(1)), attachments.add(files)]);
        export default [attachments.urls.length, attachments.note.textContent];
    """)
    assert told == [16, "A message has 16 images at most."]


def test_an_answer_that_waits_for_a_key_is_read_aloud_once(run: Run) -> None:
    """What the first request would say is nothing, in the place of what the second one does."""
    told = run(
        """
        const timers = new Set();
        const [set, clear] = [globalThis.setInterval, globalThis.clearInterval];
        globalThis.setInterval = (...args) => {
            const timer = set(...args);
            timers.add(timer);
            return timer;
        };
        globalThis.clearInterval = (timer) => {
            timers.delete(timer);
            clear(timer);
        };
    """
        + CHAT
        + """
        const fetched = globalThis.fetch;
        const during = [];
        globalThis.fetch = (...args) => {
            during.push(timers.size);
            return fetched(...args);
        };
        answers = [401, 401, "An answer"];
        await say("One");
        while (chat.turns.length < 2) await ended();
        export default [during, timers.size, chat.turns[1].content];
    """
    )
    assert told == [[3, 3, 3], 0, "An answer"]


def test_figures_of_a_run_are_there_when_it_evaluates_its_last_round_late(run: Run) -> None:
    """Lines are asked for once, those of the last round again when its held-out loss comes, all after a resumption."""
    asked, lines = run(
        """
        import "./page_browser.mjs";
        globalThis.ResizeObserver = class { observe() {} };
        const { joined, wantedAfter } = await import("./figures.js");
        const first = [{ round: 0, eval_loss: 8 }, { round: 1, loss: 7 }];
        const all = [...first, { round: 2, loss: 6, eval_loss: 6.5 }, { round: 3, loss: 5 }];
        const asked = [];
        let lines = [];
        function look(round, eval_loss) {
            const after = wantedAfter(lines, { round, eval_loss });
            asked.push(after);
            if (after === null) return;
            const come = all.filter((line) => line.round <= round && (line.round > after || !after));
            lines = joined(lines, after, come);
        }
        look(0, null);
        look(0, 8);
        look(1, 8);
        look(1, 8);
        look(3, 6.5);
        look(3, 6.5);
        all.push({ round: 3, eval_loss: 5.5 });
        look(3, 5.5);
        look(3, 5.5);
        const before = lines;
        look(2, 6.5);
        export default [asked, before];
        """
    )
    assert asked == [0, None, 0, None, 0, None, 2, None, 0]
    assert [(line["round"], line.get("loss"), line.get("eval_loss")) for line in lines] == [
        (0, None, 8),
        (1, 7, None),
        (2, 6, 6.5),
        (3, 5, None),
        (3, None, 5.5),
    ]


def test_the_lines_of_a_long_run_are_bounded_and_the_newest_stay(run: Run) -> None:
    found = run("""
        import { thinned } from "./curves.js";
        let lines = [];
        let most = 0;
        for (let round = 1; round <= 20_000; round += 1) {
            lines = thinned(lines.concat([{ round }]));
            most = Math.max(most, lines.length);
        }
        const rounds = lines.map((line) => line.round);
        export default [most, rounds[0], rounds.slice(-1000), thinned(Array(100_000).fill(0)).length];
    """)
    assert found[0] <= 4096
    assert found[1] == 1
    assert found[2] == list(range(19_001, 20_001))
    assert found[3] <= 4096
