"""The viewer over HTTP: who is let in, what a page may do, and how long an answer is."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

import httpx

import casstore
from casstore.errors import InvalidInputError
from casstore.ui.serving import Serving, is_loopback
from tests.ui.serving import Running, serve
from viewer_store import HOSTILE_ID, HOSTILE_TEXT, png

TRANSCRIPT = "app/5e55a0b1-0000-4000-8000-000000000001"
PAGES = [
    ("/", {}),
    ("/", {"order": "tree", "q": "parser"}),
    ("/charts", {}),
    ("/session", {"id": "fix-parser"}),
    ("/session", {"id": "fix-parser", "at": "8"}),
    ("/session", {"id": "fix-parser", "at": "green"}),
    ("/session", {"id": "fix-parser", "leaf": "alt.1"}),
    ("/session", {"id": "fix-parser", "node": "a2.1"}),
    ("/session", {"id": "fix-parser", "parts": "1"}),
    ("/session", {"id": "empty"}),
    ("/session", {"id": "with-hidden"}),
    ("/session", {"id": HOSTILE_ID}),
    ("/session/rows", {"id": "fix-parser", "before": "9"}),
    ("/state", {"id": "fix-parser", "path": '["tool_state","files"]'}),
    ("/node", {"session": "fix-parser", "id": "a2.1"}),
    ("/node", {"session": HOSTILE_ID, "id": "h2"}),
    ("/node", {"session": "with-hidden", "id": "secret"}),
    ("/record", {"system": "lg", "id": "trip-to-rome"}),
    ("/record", {"system": "claude", "id": TRANSCRIPT}),
    ("/compare", {}),
    ("/compare", {"a": "fix-parser", "b": "strict-mode"}),
    ("/search", {}),
    ("/search", {"q": "parser"}),
    ("/space", {}),
]


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as made:
        yield made


# --- security -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/session?id=fix-parser", "/static/viewer.js", "/events"])
def test_nothing_is_shown_without_the_cookie(running: Running, path: str) -> None:
    answer = httpx.get(running.base + path)
    assert answer.status_code == 403
    assert "fix-parser" not in answer.text
    wrong = {"cookie": f"{running.serving.keys.cookie}=wrong"}
    assert httpx.get(running.base + path, headers=wrong).status_code == 403


def test_the_token_gives_a_strict_cookie_and_nothing_else(running: Running) -> None:
    answer = httpx.get(running.address)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert running.serving.keys.token not in cookie + answer.text
    for token in ("wrong", running.serving.keys.token[:-1], running.serving.keys.session):
        refused = httpx.get(running.base + "/", params={"token": token})
        assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    elsewhere = httpx.get(running.base + "/space", params={"token": running.serving.keys.token})
    assert elsewhere.status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "localhost.evil:8642"]
)
def test_other_hosts_are_refused(client: httpx.Client, host: str) -> None:
    # A name that an attacker lets resolve to this machine is sent as the host.
    assert client.get("/", headers={"host": host}).status_code == 421


def test_the_host_is_checked_before_the_token(running: Running) -> None:
    answer = httpx.get(running.address, headers={"host": "evil.example"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (421, False)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
def test_requests_of_other_sites_are_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    assert client.get("/session", params={"id": "fix-parser"}, headers=headers).status_code == 403
    assert client.post("/check", headers=headers).status_code == 403


def test_a_write_needs_an_origin(client: httpx.Client, running: Running) -> None:
    assert client.post("/check").status_code == 403
    assert client.post("/check", headers={"origin": running.base}).status_code == 303


def test_a_link_from_elsewhere_shows_nothing_without_the_cookie(running: Running) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(running.base + "/", headers=headers).status_code == 403


@pytest.mark.parametrize(("path", "given"), PAGES)
def test_every_page_forbids_inline_scripts_and_external_resources(
    client: httpx.Client, path: str, given: dict[str, str]
) -> None:
    answer = client.get(path, params=given)
    assert answer.status_code == 200, answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    # Every tag and attribute is one of ours: what a payload holds is text.
    assert "<script>" not in answer.text
    assert not re.search(r"<[^>]* on\w+=", answer.text)
    assert not re.search(r'(src|href|action)="(?!/|#)', answer.text)
    assert "style=" not in re.sub(r">[^<]*<", "><", answer.text)
    assert "SECRET-HIDDEN-TEXT" not in answer.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f]", answer.text)
    assert answer.text.count('<li class="row') <= 300
    assert len(answer.content) <= 200_000


def test_refusals_and_errors_have_the_policy_too(running: Running, client: httpx.Client) -> None:
    for answer in (
        httpx.get(running.base + "/"),
        client.get("/nowhere"),
        client.get("/session", params={"id": "nope"}),
        client.get("/", headers={"host": "evil"}),
    ):
        assert answer.status_code >= 400
        assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/session", {}, 400),
        ("/session", {"id": "nope<script>"}, 404),
        ("/session", {"id": "fix-parser", "at": "nope"}, 404),
        ("/session", {"id": "fix-parser", "before": "-1"}, 400),
        ("/session", {"id": "fix-parser", "before": "9" * 400}, 400),
        ("/session", {"id": "fix-parser", "leaf": "nope"}, 404),
        ("/session/rows", {"id": "fix-parser", "start": "5", "last": "00"}, 205),
        ("/session/rows", {"id": "fix-parser", "start": "999999", "last": "00"}, 205),
        ("/state", {"id": "fix-parser", "path": "nope"}, 400),
        ("/state", {"id": "fix-parser", "path": "[" * 100_0}, 400),
        ("/state", {"id": "fix-parser", "path": "[[]]"}, 400),
        ("/object", {"digest": "zz"}, 400),
        ("/object", {"digest": "00" * 32}, 404),
        ("/raw", {"digest": "../../etc/passwd"}, 400),
        ("/node", {"session": "fix-parser", "id": "nope"}, 404),
        ("/record", {"system": "../lg", "id": "x"}, 404),
        ("/compare", {"a": "nope", "b": "fix-parser"}, 404),
        ("/static/..%2fpages.py", {}, 404),
        ("/static/../server.py", {}, 404),
    ],
)
def test_bad_addresses_get_a_plain_answer(
    client: httpx.Client, path: str, given: dict[str, str], status: int
) -> None:
    answer = client.get(path, params=given)
    assert answer.status_code == status
    assert "<script>" not in answer.text
    assert "Traceback" not in answer.text


def test_a_body_that_is_too_long_is_refused(client: httpx.Client, running: Running) -> None:
    answer = client.post("/act", headers={"origin": running.base}, content=b"x" * 100_000)
    assert answer.status_code == 413
    assert client.put("/act", headers={"origin": running.base}).status_code == 405


def test_a_viewer_without_write_has_a_store_that_cannot_be_written(
    own: Path,
) -> None:
    with serve(own) as running, running.client() as client:
        given = {"action": "delete", "session": "fix-parser", "confirm": "fix-parser"}
        answer = client.post("/act", data=given, headers={"origin": running.base})
        assert answer.status_code == 404
        assert "--write" in answer.text
        assert "Delete…" not in client.get("/session", params={"id": "fix-parser"}).text
    with casstore.open(own) as store:
        assert store.session("fix-parser").head() is not None


def test_is_loopback_accepts_only_loopback_hosts() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1")] == [
        True
    ] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example")] == [
        False
    ] * 4


def test_a_port_that_is_taken_is_an_error_and_by_default_another_is_used(own: Path) -> None:
    with casstore.open(own, readonly=True) as store:
        first = Serving(store, str(own), port=0)
        with pytest.raises(casstore.errors.StorageError, match="another --port"):
            Serving(store, str(own), port=first.port)
        others = [Serving(store, str(own)) for _ in range(2)]
        assert others[0].port != others[1].port
        for one in (first, *others):
            one._socket.close()
        with pytest.raises(InvalidInputError, match="host"):
            Serving(store, str(own), host="no.such.host.invalid", port=0)


# --- answers ------------------------------------------------------------------------------


def test_raw_payloads_blobs_and_images_are_served_as_what_they_are(
    client: httpx.Client, viewed: object
) -> None:
    page = client.get("/node", params={"session": HOSTILE_ID, "id": "h4"}).text
    [digest] = set(re.findall(r'<p class="digest mono">([0-9a-f]{64})</p>', page))
    raw = client.get("/raw", params={"digest": digest})
    assert raw.headers["content-type"].startswith("text/plain")
    assert json.loads(raw.text)["content"] == "<b>x" * 262_144
    picture = client.get("/find", params={"name": "picture"})
    assert picture.status_code == 303
    digest = picture.headers["location"].partition("digest=")[2]
    image = client.get("/image", params={"digest": digest})
    assert (image.headers["content-type"], image.content) == ("image/png", png())
    assert "sandbox" in image.headers["content-security-policy"]
    blob = client.get("/blob", params={"digest": digest})
    assert blob.headers["content-disposition"].startswith("attachment")
    assert blob.content == png()


def test_the_search_box_redirects_to_the_object_of_a_name(client: httpx.Client) -> None:
    for name, place in (
        ("fix-parser", "/session?id=fix-parser"),
        ("fix-parser@4", "/session?id=fix-parser&at=4"),
        ("fix-parser#a1.1", "/node?session=fix-parser&id=a1.1&at=17"),
        ("release-1.4", "/session?id=fix-parser&at=6"),
        ("langgraph:trip-to-rome", "/record?system=lg&id=trip-to-rome"),
        ("no such thing", "/?q=no+such+thing"),
        ("", "/"),
    ):
        assert client.get("/find", params={"name": name}).headers["location"] == place


def test_a_session_of_10_000_turns_is_first_shown_like_a_short_one(
    long: Path, tmp_path: Path
) -> None:
    import viewer_store

    viewer_store.build_long(tmp_path / "short", 100)
    with serve(tmp_path / "short") as running, running.client() as client:
        short = client.get("/session", params={"id": "long"})
    with serve(long) as running, running.client() as client:
        answer = client.get("/session", params={"id": "long"})
        sent = len(answer.content)
        for name in ("style.css", "viewer.js"):
            sent += len(client.get(f"/static/{name}").content)
        assert sent <= 300_000
        assert 50 <= answer.text.count('<li class="row') <= 300
        assert answer.text.count('<li class="row') == short.text.count('<li class="row')
        assert len(answer.content) <= 1.1 * len(short.content)
        assert "10,000</b> turns" in answer.text


def test_every_engine_can_be_viewed(any_store: casstore.Store) -> None:
    import threading

    session = any_store.session("s")
    step = casstore.Commit(append=[casstore.NodeDraft("n", "hello")])
    session.commit(step)
    serving = Serving(any_store, "store", port=0)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        with Running(serving).client() as client:
            for path in ("/", "/charts", "/space", "/session?id=s", "/node?session=s&id=n"):
                assert client.get(path).status_code == 200
    finally:
        serving.stop()
        thread.join(30)


def test_the_event_stream_reports_a_commit(own: Path) -> None:
    with serve(own) as running, running.client() as client:
        params = {"session": "empty"}
        with client.stream("GET", "/events", params=params) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: hello"
            writer = (
                "import casstore, sys\n"
                "with casstore.open(sys.argv[1]) as store:\n"
                "    step = casstore.Commit(append=[casstore.NodeDraft('n', 'hi')],\n"
                "                           )\n"
                "    store.session('empty').commit(step)\n"
            )
            subprocess.run([sys.executable, "-c", writer, str(own)], check=True)
            found = list(islice(lines, 5))
            assert "event: change" in found
            assert 'data: {"revision": 1}' in found


def test_the_memory_of_the_server_stays_below_200_mib(example: Path, long: Path) -> None:
    """As a process of its own: what this one has loaded does not count."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to read the memory of a process")
    for place, session in ((example, "fix-parser"), (long, "long")):
        command = [sys.executable, "-m", "casstore", "ui", str(place), "--no-browser", "--json"]
        server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            told = ""
            while not told.rstrip().endswith("}"):
                told += server.stdout.readline()
            address = json.loads(told)["address"]
            base = address.partition("/?")[0]
            with httpx.Client(base_url=base, timeout=60) as client:
                client.get(address)
                for path, given in (
                    ("/", {}), ("/charts", {}), ("/space", {}), ("/session", {"id": session}),
                    *[("/session/rows", {"id": session, "start": str(at)})
                      for at in range(0, 20_000, 4_000)],
                ):  # fmt: skip
                    assert client.get(path, params=given).status_code == 200
                status = Path(f"/proc/{server.pid}/status").read_text()
            highest = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
            assert highest < 200 * 1024
        finally:
            server.terminate()
            server.communicate(timeout=30)


def test_a_page_that_is_not_there_is_an_error_page_with_the_way_back(client: httpx.Client) -> None:
    answer = client.get("/nowhere<b>")
    assert answer.status_code == 404
    assert "<h1>Not found</h1>" in answer.text
    assert '<a href="/">To the overview</a>' in answer.text
    assert "nowhere<b>" not in answer.text


def test_values_and_checkpoints_are_opened_level_by_level(client: httpx.Client) -> None:
    for name, path, inside in (
        ("tag:notes", '["plan"]', "edit"),
        ("tag:release-1.4", '["tool_state","files"]', "src/parser.py"),
    ):
        page = client.get("/find", params={"name": name}, follow_redirects=True)
        found = re.search(r"(?:/object\?|checkpoint .*/object\?)digest=([0-9a-f]{64})", page.text)
        digest = str(page.url.params.get("digest") or (found and found[1]))
        answer = client.get("/state", params={"digest": digest, "path": path})
        assert answer.status_code == 200
        assert inside in answer.text
        assert client.get("/state", params={"digest": digest, "path": '["no"]'}).status_code == 404
    picture = client.get("/find", params={"name": "picture"}).headers["location"]
    assert client.get("/state" + picture.removeprefix("/object")).status_code == 404


def test_the_pages_of_an_empty_store_say_that_nothing_is_there(tmp_path: Path) -> None:
    casstore.open(tmp_path / "s").close()
    with serve(tmp_path / "s") as running, running.client() as client:
        for path, text in (
            ("/", "This store has no sessions yet."),
            ("/charts", "Nothing yet."),
            ("/space", "No sessions yet."),
            ("/space", "No objects yet."),
        ):
            assert text in client.get(path).text


def test_hostile_records_stay_text(tmp_path: Path) -> None:
    from langchain_core.messages import HumanMessage
    from langgraph.checkpoint.base import empty_checkpoint

    from casstore.adapters.claude.transcripts import TranscriptKey, Transcripts
    from casstore.adapters.langgraph import CasstoreSaver

    with casstore.open(tmp_path / "s") as store:
        message = {"role": "user", "content": HOSTILE_TEXT}
        entry: Any = {"type": "user", "uuid": HOSTILE_TEXT, "message": message}
        Transcripts(store).append(TranscriptKey("p", HOSTILE_ID), [entry])
        checkpoint: Any = empty_checkpoint()
        checkpoint["channel_values"] = {HOSTILE_TEXT: [HumanMessage(HOSTILE_TEXT)]}
        checkpoint["channel_versions"] = {HOSTILE_TEXT: "1"}
        config: Any = {"configurable": {"thread_id": HOSTILE_ID, "checkpoint_ns": ""}}
        CasstoreSaver(store).put(config, checkpoint, {"step": 0}, {HOSTILE_TEXT: "1"})
    with serve(tmp_path / "s") as running, running.client() as client:
        listed = client.get("/").text
        records = re.findall(r'href="(/record\?[^"]+)"', listed)
        assert len(records) == 2
        for page in (listed, *[client.get(html.unescape(one)).text for one in records]):
            assert "<h1>" in page
            assert "document.title" in page
            assert not re.search(r"<(script>|img src=x|svg onload)", page)
            assert not re.search("[\u202a-\u202e\u2066-\u2069\x07\x1b]", page)
