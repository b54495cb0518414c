"""The viewer in a real Chromium: pages, live updates, writing, keyboard, colours, windows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

import casstore
from tests.ui.serving import Running, serve
from viewer_store import HOSTILE_ID

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
     if (path := shutil.which(name))),
    None,
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"
)
WIDE = {"width": 1360, "height": 860}
NARROW = {"width": 400, "height": 780}


# Of this module only: playwright runs an event loop in this thread while it is there.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Its sandbox needs privileges that containers do not give; the pages are our own.
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def opened(
    browser: Browser, running: Running, *, narrow: bool = False, dark: bool = False
) -> Iterator[Page]:
    """A page that was let in; it must load nothing from elsewhere and report no error."""
    context = browser.new_context(
        viewport=NARROW if narrow else WIDE,  # type: ignore[arg-type]
        color_scheme="dark" if dark else "light",
    )
    page = context.new_page()
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((running.base, "data:")) else wrong.append(asked.url)
        ),
    )
    page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    page.goto(running.address)
    page.wait_for_url(f"{running.base}/")
    page.wait_for_selector("html[data-ready]")
    yield page
    context.close()
    assert wrong == []


def go(page: Page, running: Running, path: str, **given: str) -> None:
    page.goto(f"{running.base}{path}" + (f"?{urlencode(given)}" if given else ""))
    page.wait_for_selector("html[data-ready]")


def widths(page: Page) -> tuple[int, int]:
    """How wide the content is, and how wide the window."""
    found = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return found[0], found[1]


# Text, and its background: the smallest contrast on the page, and where it is.
CONTRAST = """() => {
  const parts = (colour) => {
    const found = colour.match(/[0-9.]+/g).map(Number);
    return found.length < 4 ? [...found, 1] : found;
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => one / 255)
      .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let worst = [21, ""];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .off, dialog, option")) continue;
    const above = [];
    for (let one = element; one; one = one.parentElement) above.unshift(getComputedStyle(one));
    let below = [255, 255, 255];
    for (const style of above) below = over(parts(style.backgroundColor), below);
    const style = above.at(-1);
    const colour = parts(element instanceof SVGElement ? style.fill : style.color);
    for (const one of above) colour[3] *= Number(one.opacity);
    const [low, high] = [light(over(colour, below)), light(below)].sort((a, b) => a - b);
    const found = (high + 0.05) / (low + 0.05);
    if (found < worst[0]) worst = [found, element.outerHTML.slice(0, 200)];
  }
  return worst;
}"""


def assert_readable(page: Page) -> None:
    """All text has the contrast of level AA of the Web Content Accessibility Guidelines."""
    expect(page.locator("text=/Measuring…|Searching…/")).to_have_count(0)
    contrast, where = page.evaluate(CONTRAST)
    assert contrast >= 4.5, (page.url, where)


def test_the_token_leaves_the_address_and_the_cookie_is_strict(
    browser: Browser, running: Running
) -> None:
    with opened(browser, running) as page:
        assert "token" not in page.url
        [cookie] = page.context.cookies()
        assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")
        assert page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("look", ["light and wide", "dark and narrow"])
def test_every_page_is_drawn(browser: Browser, running: Running, look: str) -> None:
    dark = look == "dark and narrow"
    with opened(browser, running, narrow=dark, dark=dark) as page:
        # The overview: the whole content, forks as a tree, charts.
        expect(page.locator("#list tbody tr")).to_have_count(53)
        expect(page.locator("#charts .figure").first).to_be_visible()
        expect(page.locator("#charts svg.growth rect").first).to_be_attached()
        assert_readable(page)
        go(page, running, "/", order="tree")
        expect(page.locator("td.depth-3")).to_contain_text("strict-with-switch")
        assert_readable(page)
        # A session: turns, calls joined with results, lanes, state, queue and lease.
        go(page, running, "/session", id="fix-parser")
        expect(page.locator("li.row")).to_have_count(33)
        expect(page.locator("li.turn").first).to_contain_text("Turn 1")
        call = page.locator(".tool.call .jump").first
        assert page.locator(str(call.get_attribute("href"))).count() == 1
        expect(page.locator(".lane")).to_have_count(8)
        expect(page.locator("#work")).to_contain_text("worker-7")
        expect(page.locator("li.event.rewind")).to_contain_text("rewound to revision 10")
        expect(page.locator("img.picture").first).to_be_attached()
        assert_readable(page)
        # A node, an object, a comparison, the space, record systems.
        go(page, running, "/node", session="fix-parser", id="a2.3")
        expect(page.get_by_text("Shared by")).to_be_visible()
        expect(page.locator("main")).to_contain_text("strict-mode")
        assert_readable(page)
        go(page, running, "/find", name="picture")
        assert page.locator("img.picture").evaluate("image => image.naturalWidth") == 96
        assert_readable(page)
        go(page, running, "/compare", a="fix-parser@6", b="warn-only")
        expect(page.locator("main")).to_contain_text("They diverged after a3.3")
        expect(page.locator(".diff .plus").first).to_be_visible()
        assert_readable(page)
        go(page, running, "/space")
        expect(page.locator("main")).to_contain_text("gc would remove")
        assert_readable(page)
        go(page, running, "/record", system="lg", id="trip-to-rome")
        expect(page.locator("main")).to_contain_text("Sunny, 24 degrees.")
        assert_readable(page)
        go(page, running, "/record", system="claude", id="app/5e55a0b1-0000-4000-8000-000000000001")
        expect(page.locator("main")).to_contain_text("Why is the build slow?")
        assert_readable(page)
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", colour)[:3])) > 384
        assert light is not dark


def test_a_narrow_window_needs_no_scrolling_to_the_side(browser: Browser, running: Running) -> None:
    with opened(browser, running, narrow=True) as page:
        for path in ("/", "/session?id=fix-parser", "/compare?a=fix-parser&b=rewrite", "/space",
                     "/node?session=fix-parser&id=a2.1"):  # fmt: skip
            go(page, running, path)
            expect(page.locator("text=Measuring…")).to_have_count(0)
            content, window = widths(page)
            assert content <= window, path


def test_the_list_is_searched_while_typing(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        page.keyboard.press("/")
        page.keyboard.type("strict")
        expect(page.locator("#list tbody tr")).to_have_count(3)
        expect(page.locator(".total")).to_have_text("3")
        assert "q=strict" in page.url


def test_a_live_update_during_a_search_keeps_the_search(browser: Browser, running: Running) -> None:
    """The update loads the list as well, and its answer may come first."""
    held: list[Route] = []

    def hold_the_first(route: Route) -> None:
        if held:
            route.continue_()
        held.append(route)

    with opened(browser, running) as page:
        page.add_init_script("""EventSource = class extends EventSource {
            constructor(url) { super(url); window.stream = this; } }""")
        go(page, running, "/")
        page.route("**/?*q=strict*", hold_the_first)
        with page.expect_request("**/?*q=strict*"):
            page.keyboard.press("/")
            page.keyboard.type("strict")
        with page.expect_response(f"{running.base}/**"):
            # As if another process had committed.
            page.evaluate("""stream.dispatchEvent(
                new MessageEvent("change", { data: JSON.stringify({ version: "later" }) }))""")
        held[0].continue_()
        # Soon: the next live update, some seconds later, would repair the list.
        expect(page.locator("#list tbody tr")).to_have_count(3, timeout=1500)


def test_the_slider_goes_through_revisions(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        go(page, running, "/session", id="fix-parser")
        slider = page.get_by_label("Revision", exact=True)
        slider.focus()
        page.keyboard.press("Home")
        expect(page.locator("li.row")).to_have_count(1)
        expect(page.get_by_label("Revision", exact=True)).to_be_focused()
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        expect(page.locator("h1 .at")).to_have_text("@8")
        expect(page.locator("#side")).to_contain_text("Changed by revision 8")
        expect(page.locator("#side .changes .diff .plus").first).to_be_visible()
        expect(page.locator("li.row.new")).to_have_count(5)
        page.keyboard.press("]")
        expect(page.locator("h1 .at")).to_have_text("@9")
        page.go_back()
        expect(page.locator("h1 .at")).to_have_text("@8")


def test_a_state_entry_is_expanded_on_click(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        go(page, running, "/session", id="fix-parser")
        page.locator("#side summary", has_text="files").click()
        expect(page.locator("#side .tree")).to_contain_text(["src/parser.py"])


def test_hostile_content_stays_text(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        for path, given in (
            ("/", {"q": "evil"}), ("/session", {"id": HOSTILE_ID}),
            ("/node", {"session": HOSTILE_ID, "id": "h1\"'><script>"}),
            ("/node", {"session": HOSTILE_ID, "id": "h4"}),
            ("/compare", {"a": f"session:{HOSTILE_ID}", "b": "fix-parser"}),
        ):  # fmt: skip
            go(page, running, path, **given)
            page.wait_for_timeout(50)
            assert "owned" not in page.title() or "script" in page.title()
            assert page.title() != "owned"
            assert page.locator("main script, main svg[onload], main img[onerror]").count() == 0
            content, window = widths(page)
            assert content <= window


def test_a_call_leads_to_its_result_from_every_page(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        for path in ("/node?session=fix-parser&id=a2.1", "/compare?a=fix-parser@3&b=fix-parser@4"):
            go(page, running, path)
            page.locator(".tool.call .jump").first.click()
            expect(page.locator(".tool.result:target")).to_contain_text("found[key] = value")
            expect(page.locator(".tool.result:target")).to_be_in_viewport()


def test_the_first_commit_appears_on_the_page_of_an_empty_session(
    browser: Browser, own: Path
) -> None:
    with serve(own, write=True) as running, opened(browser, running) as page:
        go(page, running, "/session", id="empty")
        with casstore.open(own) as store:
            store.session("empty").queue.enqueue([{"task": "begin"}], batch_id="first-task")
            expect(page.locator("#work")).to_contain_text("first-task")
            store.session("empty").append({"role": "user", "content": "begun"})
        expect(page.locator("li.row")).to_contain_text("begun")
        expect(page.locator("#live")).to_have_text("live")


def test_a_compaction_usage_and_cost_are_marked(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        go(page, running, "/session", id="compacted")
        expect(page.locator("li.row.compacted")).to_contain_text(
            "Summary in the place of earlier messages"
        )
        expect(page.locator("li.row").last).to_contain_text("5,200 tokens in · 310 out · $0.0187")
        assert_readable(page)


def test_hidden_nodes_are_marked(browser: Browser, running: Running) -> None:
    with opened(browser, running) as page:
        go(page, running, "/session", id="with-hidden")
        expect(page.locator("li.row.hidden-node")).to_contain_text("hidden by a tombstone")
        assert_readable(page)
        assert "SECRET" not in page.content()


def test_new_commits_of_another_process_appear(browser: Browser, own: Path) -> None:
    writer = """
import sys, casstore
from casstore import Commit, NodeDraft
with casstore.open(sys.argv[1]) as store:
    session = store.session("rewrite")
    if sys.argv[2] == "commit":
        for at in range(3):
            message = {"role": "user", "content": f"live {at}"}
            session.commit(Commit(append=[NodeDraft(f"live-{at}", message)]))
    elif sys.argv[2] == "rewind":
        session.rewind(10)
"""

    def write(what: str) -> None:
        subprocess.run([sys.executable, "-c", writer, str(own), what], check=True)

    with serve(own) as running, opened(browser, running) as page:
        go(page, running, "/session", id="rewrite")
        expect(page.locator("li.row")).to_have_count(36)
        page.locator("#side summary", has_text="files").click()
        write("commit")
        expect(page.locator("li.row")).to_have_count(39)
        expect(page.locator("li.row").last).to_contain_text("live 2")
        expect(page.locator("#slider output")).to_have_text("17")
        # What a reader has opened stays open, and the end stays in sight.
        expect(page.locator("#side details[open] summary", has_text="files")).to_have_count(1)
        expect(page.locator("li.row").last).to_be_in_viewport()
        write("rewind")
        expect(page.locator("#slider output")).to_have_text("18")
        expect(page.locator("li.row")).to_have_count(28)
        expect(page.locator("li.event.rewind")).to_have_count(1)


def test_the_overview_shows_changes_of_another_process(browser: Browser, own: Path) -> None:
    writer = """
import sys, casstore
from casstore import Commit, NodeDraft
with casstore.open(sys.argv[1]) as store:
    message = {"role": "user", "content": "live " * 20_000}
    store.session("arrived").commit(Commit(append=[NodeDraft(sys.argv[2], message)]))
    store.check(level="full")
"""

    def write(node: str) -> None:
        subprocess.run([sys.executable, "-c", writer, str(own), node], check=True)

    with serve(own) as running, opened(browser, running) as page:
        rows = page.locator("#list tbody tr")
        expect(rows).to_have_count(53)
        expect(page.locator("#health")).to_contain_text("No check has stored its result yet")
        expect(page.locator("#list td:nth-child(5)", has_text="…")).to_have_count(0)
        fifth = rows.nth(4).locator("a").first
        fifth.focus()
        name = fifth.inner_text()
        page.evaluate("addEventListener('animationstart', one => window.moved = one.target)")
        write("first")
        expect(rows).to_have_count(54)
        expect(rows.first).to_contain_text("arrived")
        expect(page.locator(".total")).to_have_text("54")
        page.wait_for_function("window.moved?.textContent.includes('arrived')")
        # The focus stays on its session, which is a row further down now.
        assert page.evaluate("document.activeElement.innerText") == name
        # The sizes are measured again soon after.
        expect(rows.first.locator("td").nth(4)).to_have_text(re.compile("^9[0-9.]+ KiB$"))
        page.get_by_label("Search the content").fill("arrived")
        expect(rows).to_have_count(1)
        expect(rows.first.locator("td").nth(2)).to_have_text("1")
        write("second")
        expect(rows.first.locator("td").nth(2)).to_have_text("2")
        expect(rows).to_have_count(1)
        expect(page.locator("#health")).to_contain_text("Sound at the last check")


def test_each_action_is_confirmed_in_a_dialog_and_done(browser: Browser, own: Path) -> None:
    with serve(own, write=True) as running, opened(browser, running) as page:

        def act(opener: str, submit: str, **fields: str) -> None:
            page.get_by_role("button", name=opener).first.click()
            dialog = page.locator("dialog[open]")
            expect(dialog).to_be_visible()
            for label, value in fields.items():
                dialog.get_by_label(label.replace("_", " ")).fill(value)
            dialog.get_by_role("button", name=submit, exact=True).click()

        go(page, running, "/session", id="strict-mode", at="5")
        act("Label…", "Label", Label="checked")
        expect(page.locator(".revision .pill.label")).to_have_text("checked")
        act("Tag…", "Tag", Tag="keep-this")
        expect(page.locator(".pill.tag")).to_have_text("tag keep-this")
        page.get_by_role("button", name="Rewind…").click()
        expect(page.locator("dialog[open]")).to_contain_text("Nothing is lost")
        page.locator("dialog[open]").get_by_role("button", name="Cancel").click()
        expect(page.locator("dialog[open]")).to_have_count(0)
        act("Rewind…", "Rewind")
        expect(page.locator("#slider output")).to_have_text("7")
        act("Fork…", "Fork", Id_of_the_new_session="forked-here")
        expect(page.locator("h1")).to_have_text("forked-here")
        page.locator("li.row", has_text="I will look").first.get_by_role(
            "button", name="Fork here"
        ).click()
        expect(page.locator("dialog[open]")).to_contain_text("node a1.1")
        page.locator("dialog[open] input[name=target]").fill("at-a-node")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("at-a-node")
        expect(page.locator("li.row")).to_have_count(2)
        act("Adopt…", "Adopt", Id_of_the_other_session="warn-only")
        expect(page.locator("li.row")).to_have_count(26)
        act("Delete…", "Delete", Type_its_id_to_confirm="at-a-node")
        page.wait_for_url(f"{running.base}/")
    with casstore.open(own) as store:
        assert store.find_pin("keep-this") is not None
        assert store.session("strict-mode").entry("checked").revision == 5
        assert store.session("forked-here").head() is not None
        with pytest.raises(casstore.errors.SessionDeletedError):
            store.session("at-a-node").head()


def test_the_keyboard_alone_reaches_everything(browser: Browser, own: Path) -> None:
    with serve(own, write=True) as running, opened(browser, running) as page:
        for path in (
            "/?q=strict", "/compare?a=fix-parser@6&b=warn-only", "/find?name=picture",
            "/node?session=fix-parser&id=a2.1", "/record?system=lg&id=trip-to-rome",
            "/session?id=with-hidden",
        ):  # fmt: skip
            go(page, running, path)
            expect(page.locator("text=/Measuring…|Searching…/")).to_have_count(0)
            wanted = page.evaluate(
                """() => [...document.querySelectorAll(
                     'a[href], summary, select, button:not([disabled]), '
                     + 'input:not([type=hidden]):not([disabled])')]
                   .filter(one => one.checkVisibility() && !one.closest('dialog'))
                   .map((one, at) => one.dataset.nr = String(at))"""
            )
            reached = set()
            page.evaluate("document.activeElement.blur()")
            # What is in sight when the page is there; rows loaded on the way come on top.
            for _ in range(3 * len(wanted)):
                page.keyboard.press("Tab")
                number = page.evaluate("document.activeElement?.dataset?.nr ?? null")
                if number is not None:
                    reached.add(number)
                if reached >= set(wanted):
                    break
            assert set(wanted) <= reached, path
        # A dialog by keyboard: opened, left with Escape, opened again, filled, sent.
        page.get_by_role("button", name="Label…").focus()
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open] input[name=name]")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("dialog[open]")).to_have_count(0)
        page.keyboard.press("Enter")
        page.keyboard.type("by-keyboard")
        page.keyboard.press("Enter")
        expect(page.locator(".revision .pill.label")).to_have_text("by-keyboard")


def test_a_long_session_is_loaded_as_the_reader_scrolls(browser: Browser, long: Path) -> None:
    with serve(long) as running, opened(browser, running) as page:
        sent: list[int] = []
        page.on("response", lambda one: sent.append(len(one.body())) if one.ok and
                "/events" not in one.url else None)  # fmt: skip
        go(page, running, "/session", id="long")
        page.wait_for_timeout(100)
        assert sum(sent) <= 300_000
        assert page.locator("ol.rows > li").count() <= 300
        expect(page.locator("li.row").last).to_be_in_viewport()
        seen = set()
        for _ in range(12):
            page.evaluate("document.querySelector('#timeline').scrollTop = 0")
            page.wait_for_timeout(60)
            assert page.locator("ol.rows > li").count() <= 300
            seen.add(page.locator("li.row").first.get_attribute("data-at"))
        assert len(seen) > 3
        rows = page.eval_on_selector_all("li.row", "all => all.map(one => Number(one.dataset.at))")
        assert rows == list(range(rows[0], rows[-1] + 1))
        for _ in range(12):
            page.evaluate("document.querySelector('#timeline').scrollTop = 1e9")
            page.wait_for_timeout(60)
        expect(page.locator("li.row").last).to_contain_text("yes")
        rows = page.eval_on_selector_all("li.row", "all => all.map(one => Number(one.dataset.at))")
        assert rows == list(range(rows[0], rows[-1] + 1))


def test_an_exported_file_opens_from_disk(browser: Browser, example: Path, tmp_path: Path) -> None:
    from casstore.ui.export import write_file

    target = tmp_path / "session.html"
    with casstore.open(example, readonly=True) as store:
        write_file(store, "fix-parser", target)
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.goto(target.as_uri())
    assert page.locator("li.row").count() == 33
    assert page.locator("img.picture").evaluate("image => image.naturalWidth") == 96
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()
