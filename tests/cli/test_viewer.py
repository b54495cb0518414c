"""``casstore ui`` and ``casstore html`` as commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore.cli.command import App
from casstore.errors import ReadOnlyError
from tests.cli.running import HOSTILE, run

pytest.importorskip("starlette", reason="the viewer needs starlette: pip install '.[ui]'")


def started(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    command = [sys.executable, "-m", "casstore", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    told = ""
    while not told.rstrip().endswith("}"):
        line = server.stdout.readline()
        assert line, server.communicate()
        told += line
    return server, json.loads(told)


def test_ui_prints_its_address_and_ends_with_an_interrupt(own: str) -> None:
    server, told = started("ui", own, "--port", "0", "--no-browser", "--write", "--json")
    try:
        assert str(told["address"]).startswith("http://127.0.0.1:")
        assert (told["write"], told["store"]) == (True, own)
        import urllib.request

        with urllib.request.urlopen(str(told["address"])) as answer:
            assert answer.status == 200
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)
    assert server.returncode == 0


class Probe:
    """In the place of a server: tries to write."""

    address = "http://127.0.0.1:1/?token=t"

    def __init__(self, store: casstore.Store, place: str, **options: object) -> None:
        self._store = store

    def run(self) -> None:
        self._store.put_blob(b"written")


def test_ui_opens_the_store_read_only_unless_asked_to_write(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.ui.serving.Serving", Probe)
    told = run("ui", own, "--no-browser", ends=None)
    assert told.code == ReadOnlyError.exit_code
    assert "read-only" in told.err
    assert run("ui", own, "--no-browser", "--write").out.strip() == Probe.address


def test_ui_shows_no_password(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casstore.ui.serving.Serving", Probe)
    monkeypatch.setattr(App, "open", lambda self, **_: casstore.open(own))
    told = run("ui", "postgresql://ada:hunter2@db.example/s", "--no-browser", "--json")
    assert told.json["store"] == "postgresql://ada@db.example/s"
    assert "hunter2" not in told.out + told.err


def test_ui_warns_at_once_of_a_host_that_others_reach(own: str) -> None:
    given = ("ui", own, "--no-browser", "--host", "0.0.0.0", "--port", "0", "--quiet")
    server = subprocess.Popen(
        [sys.executable, "-m", "casstore", *given],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        assert server.stdout.readline().startswith("http://localhost:")
        # While it serves, not when it ends.
        assert "can be reached from other machines" in server.stderr.readline()
    finally:
        server.terminate()
        server.communicate(timeout=30)
    server, told = started("ui", own, "--no-browser", "--host", "0.0.0.0", "--port", "0", "--json")
    server.terminate()
    server.communicate(timeout=30)
    assert "can be reached from other machines" in str(told["warning"])


def test_ui_refuses_a_store_that_is_not_there(tmp_path: Path) -> None:
    assert run("ui", str(tmp_path / "nothing"), "--no-browser", ends=None).code not in (0, 70)


def test_html_writes_a_file(example: str, tmp_path: Path) -> None:
    target = tmp_path / "agent.html"
    told = run(
        "html", "agent@5", "--output", str(target), "--redact", "turn", "--json", store=example
    ).json
    assert (told["session"], told["revision"], told["nodes"], told["hidden"]) == ("agent", 5, 5, 0)
    assert told["size_bytes"] == target.stat().st_size
    assert told["redacted"] > 0
    assert "turn 4" not in target.read_text()
    tagged = run("html", "release", "-o", str(target), "--json", store=example).json
    assert (tagged["session"], tagged["revision"]) == ("agent", 5)
    run("html", HOSTILE, "-o", str(target), store=example)
    assert "\x1b" not in target.read_text()


def test_html_refuses_an_unknown_session_and_an_invalid_pattern(
    example: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "out.html")
    assert "name a session" in run("html", "note", "-o", target, store=example, ends=None).err
    assert "regular expression" in run(
        "html", "agent", "-o", target, "--redact", "(", store=example, ends=None
    ).err  # fmt: skip
    assert (
        "nothing was committed" in run("html", "empty", "-o", target, store=example, ends=None).err
    )
    assert not Path(target).exists()


def test_the_viewer_names_the_package_that_is_not_installed(example: str) -> None:
    script = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
        "from casstore.cli import run; sys.argv = ['casstore', 'ui', '--no-browser']; run()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={"CASSTORE_PATH": example, "PATH": ""},
    )  # fmt: skip
    assert answer.returncode != 0
    assert "pip install '.[ui]'" in answer.stderr
