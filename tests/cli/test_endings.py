"""How commands end: exit codes, errors with what to try next, interrupts, broken pipes, colours."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Commit, NodeDraft, errors
from casstore.cli.advice import advice
from casstore.cli.main import MODULE_OF
from tests.cli.running import run
from tests.faults.children import killed_at_the_end

ROOT = Path(__file__).parent.parent.parent


def environment(**more: str) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CASSTORE_PATH")
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", **more}


def process(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "casstore", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "remedy"),
    [
        (("show", "nowhere"), 4, "casstore sessions"),
        (("show", "agent@99"), 4, "casstore history agent"),
        (("log", "agent#n99"), 4, "casstore log agent"),
        (("show", "0" * 64), 4, "casstore sessions"),
        (("tag", "release", "agent@2"), 5, "--move"),
        (("fork", "agent", "other"), 5, "choose another id"),
        (("show",), 2, "casstore show --help"),
        (("shwo",), 2, "casstore --help"),
        (("show", "agent", "--what"), 2, "casstore show --help"),
    ],
)
def test_every_refusal_says_what_to_try_next(
    own: str, arguments: tuple[str, ...], code: int, remedy: str
) -> None:
    text = run(*arguments, store=own, ends=code)
    assert text.out == ""
    assert text.err.startswith("error: ")
    assert remedy in text.err.split("try: ")[1]
    told = run(*arguments, "--json", store=own, ends=code).error
    assert told["schema"] == "casstore.error/1"
    assert (told["exit_code"], remedy in told["try"]) == (code, True)
    assert set(told) == {"schema", "error", "message", "try", "exit_code"}


@pytest.mark.parametrize(
    "arguments",
    [("put",), ("put", "--value"), ("import", "bundle"), ("verify",), ("prune", "--yes", "--from")],
    ids=" ".join,
)
def test_a_missing_file_is_not_reported_as_a_disk_error(
    own: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    missing = str(tmp_path / "nofile")
    told = run(*arguments, missing, store=own, ends=4).err
    assert told == f"error: there is no file {missing}\ntry: name the file to read from\n"
    run(*arguments, f"{own}/data.mdb/below", store=own, ends=4)
    before = os.listdir("/proc/self/fd")
    told = run(*arguments, str(tmp_path), store=own, ends=3).err
    assert told.startswith(f"error: {tmp_path} is a directory; name a file\n")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_misspelt_name_gets_suggestions_of_similar_ones(example: str) -> None:
    assert "Did you mean 'show'?" in run("shwo", store=example, ends=2).err


def test_the_error_for_a_missing_store_suggests_init(tmp_path: Path) -> None:
    for arguments in (("sessions",), ("gc",), ("stats",)):
        ran = run(*arguments, store=str(tmp_path / "nowhere"), ends=4)
        assert "no store at" in ran.err
        assert "casstore init" in ran.err
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_is_not_a_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    for arguments in (("sessions",), ("init",), ("gc",)):
        ran = run(*arguments, store=str(tmp_path), ends=9)
        assert "not empty" in ran.err
    assert sorted(os.listdir(tmp_path)) == ["letter"]
    assert "a store is a directory" in run("sessions", store=str(tmp_path / "letter"), ends=3).err


def test_a_damaged_file_ends_with_the_code_for_damage(own: str) -> None:
    data = Path(own) / "data.mdb"
    data.write_bytes(data.read_bytes()[: 3 * 4096])
    ran = run("sessions", store=own, ends=8)
    assert "casstore check" in ran.err


def test_no_message_suggests_the_command_that_just_failed(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere, new = str(tmp_path / "nowhere"), str(tmp_path / "new")
    told = run("salvage", nowhere, new, ends=4).err
    assert "try: name the directory of the damaged store" in told
    assert "--create makes it" in run("copy", new, store=own, ends=4).err
    data = Path(own) / "data.mdb"
    data.write_bytes(data.read_bytes()[:100])
    assert "try: casstore salvage DAMAGED NEW" in run("check", store=own, ends=8).err
    assert "try: restore a backup" in run("salvage", own, new, ends=8).err
    # A store that is called like a command is none.
    os.rename(own, tmp_path / "check")
    monkeypatch.chdir(tmp_path)
    assert "try: casstore check" in run("--store", "check", "stats", ends=8).err


def test_the_error_for_a_reader_without_write_access_to_the_lock_file_explains_it(
    example: str,
) -> None:
    script = (
        "import contextlib, os, sys\n"
        "from casstore.cli import main\n"
        # Loads all that is needed: this Python may be in a directory of root's.
        "with contextlib.suppress(SystemExit):\n"
        "    main.cli.main(['sessions', '--store', '/nowhere/at-all'])\n"
        "print('--', file=sys.stderr, flush=True)\n"
        # Root may do everything.
        "os.geteuid() or os.seteuid(65534)\n"
        "main.main()\n"
    )
    # Nobody else comes into pytest's own directory.
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        own = shutil.copytree(example, f"{place}/own")
        for at, _, files in os.walk(own):
            os.chmod(at, 0o755)
            for name in files:
                os.chmod(f"{at}/{name}", 0o444)
        ran = subprocess.run(
            [sys.executable, "-c", script, "sessions", "--store", own],
            env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 10, ran
    told = ran.stderr.partition("--\n")[2]
    assert told.startswith(f"error: no right to open {own}: Permission denied; readers need")
    assert "lock.mdb" in told


def test_the_store_is_taken_from_the_option_then_the_variable_then_the_current_directory(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    assert "agent" in run("sessions").out
    assert run("sessions", store=str(tmp_path / "x"), ends=4)
    assert "agent" in run("--store", example, "sessions", store=str(tmp_path / "x")).out
    assert "agent" in run("sessions", "-s", example, store=str(tmp_path / "x")).out
    assert run("--json", "sessions", store=example).json["sessions"]


@pytest.mark.parametrize("theirs", ["full", "relaxed"])
@pytest.mark.parametrize("ours", ["full", "relaxed"])
def test_commands_of_either_durability_write_concurrently_with_a_process_of_either(
    own: str, theirs: str, ours: str
) -> None:
    script = (
        "import casstore, sys\n"
        "store = casstore.open(sys.argv[1], sys.argv[2])\n"
        "store.tag('theirs', store.put_value('one'))\n"
        "print(1, flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, own, theirs],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    with killed_at_the_end(holder):
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        run("tag", "ours", "theirs", "--durability", ours, store=own)
    # The other process was killed, and closed nothing.
    kept = {one["name"]: one["digest"] for one in run("tag", "--json", store=own).json["tags"]}
    assert kept["ours"] == kept["theirs"]


@pytest.mark.parametrize("durability", ["process", "any"])
def test_an_unknown_durability_is_refused(own: str, durability: str) -> None:
    refused = run("label", "agent", "x", "--durability", durability, store=own, ends=2)
    assert "'full', 'relaxed'" in refused.err


def test_every_kind_of_error_has_a_code_and_most_have_advice() -> None:
    kinds = [
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.CasstoreError)
    ]  # fmt: skip
    document = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for code in {kind.exit_code for kind in kinds}:
        assert f"\n| {code} |" in document
    for kind in (
        errors.StoreNotFoundError, errors.CorruptionError, errors.BusyError, errors.StorageError,
        errors.ForeignStoreError, errors.StorageFullError, errors.ReadOnlyError,
    ):  # fmt: skip
        assert advice(kind("x"))
    for text in (advice(errors.CorruptionError("x")), advice(errors.StorageFullError("x"))):
        # What it tells people to run can be run.
        assert text is not None
        for command in re.findall(r"casstore (\w+)", text):
            assert command in MODULE_OF


# --- real processes -----------------------------------------------------------------------


def until(ready: Callable[[], bool], worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert worker.poll() is None, worker.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_stops_a_collection_and_its_report_is_printed(tmp_path: Path) -> None:
    place = str(tmp_path / "full")
    with casstore.open(place, durability="relaxed") as store:
        store.put_many([number.to_bytes(4, "big") for number in range(4000)])
    collecting = process("gc", "--store", place, "--grace", "0", "--batch", "1", "--json",
                         "--durability", "relaxed")  # fmt: skip
    with (
        killed_at_the_end(collecting) as worker,
        casstore.open(place, readonly=True) as watching,
    ):

        def begun() -> bool:
            return sum(1 for _ in watching.engine.scan_objects(limit=10**6)) < 3990

        until(begun, worker)
        worker.send_signal(signal.SIGINT)
        out, err = worker.communicate(timeout=60)
        left = sum(1 for _ in watching.engine.scan_objects(limit=10**6))
    told = json.loads(out)
    assert worker.returncode == 130
    assert told["outcome"] == "incomplete"
    assert 0 < told["objects_swept"] == 4000 - left
    assert b"Traceback" not in err
    assert run("gc", "--grace", "0", "--json", store=place).json["objects_swept"] == left


def test_ctrl_c_in_any_other_command_ends_quietly(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Opening it for writing waits until the command has opened it; then it sleeps in reading.
    with (
        killed_at_the_end(process("put", str(fifo), "--store", place)) as worker,
        open(fifo, "wb"),
    ):
        status = Path(f"/proc/{worker.pid}/stat")
        until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S", worker)
        worker.send_signal(signal.SIGINT)
        out, err = worker.communicate(timeout=60)
    assert (worker.returncode, out, err) == (130, b"", b"error: interrupted\n")


# Interrupts itself when so many modules of casstore and of what it needs were looked for.
_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    left = int(sys.argv.pop(1))

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("casstore", "click", "lmdb", "zstandard"):
            Interrupting.left -= 1
            if not Interrupting.left:
                os.kill(os.getpid(), signal.SIGINT)
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from casstore.cli import run
run()
"""


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("imports", [3, 4, 10, 40])
def test_ctrl_c_while_the_command_line_is_starting_ends_quietly(
    tmp_path: Path, imports: int, *, as_json: bool
) -> None:
    arguments = ["init", str(tmp_path / "store"), *(["--json"] if as_json else [])]
    ran = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT, str(imports), *arguments],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (130, "")
    if as_json:
        told = json.loads(ran.stderr)
        assert (told["schema"], told["error"]) == ("casstore.error/1", "Interrupted")
    else:
        assert ran.stderr == "error: interrupted\n"
    assert not (tmp_path / "store").exists()


def test_the_installed_command_uses_the_entry_point_that_handles_ctrl_c() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"casstore": "casstore.cli:run"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_command_leaves_nothing_half_written(
    own: str, tmp_path: Path, number: signal.Signals
) -> None:
    """What diff had unpacked of a bundle, all that it holds, stayed where such files are."""
    place = tmp_path / "temporary"
    place.mkdir()
    bundle = str(tmp_path / "bundle")
    run("export", "agent", bundle, store=own)
    with casstore.open(own) as store:
        long = [NodeDraft(f"long{at}", "x" * 100_000) for at in range(4)]
        store.session("agent").commit(Commit(append=long))
    comparing = subprocess.Popen(
        [sys.executable, "-m", "casstore", "diff", bundle, "agent", "--patch", "--store", own],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(TMPDIR=str(place)),
    )  # fmt: skip
    with killed_at_the_end(comparing) as worker:
        assert worker.stdout is not None
        # From here on it waits for somebody to read the rest, which no pipe has room for.
        worker.stdout.read(1)
        assert os.listdir(place)
        worker.send_signal(number)
        _, err = worker.communicate(timeout=60)
    assert (worker.returncode, err) == (-number, b"")
    assert os.listdir(place) == []


def test_a_closed_output_is_no_error_message(own: str) -> None:
    run("put", "--tag", "long", store=own, stdin=b"x" * 3_000_000)
    for arguments in (("cat", "long"), ("cat", "long", "--json")):
        worker = process(*arguments, "--store", own)
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.read(10)
        worker.stdout.close()
        assert worker.wait(60) == 141
        assert worker.stderr.read() == b""
        worker.stderr.close()


def on_terminal(
    *arguments: str, answer_to: Path | None = None, typed: bytes = b"", **more: str
) -> str:
    """What a command writes to a terminal; the answer may go to a file."""
    ours, theirs = pty.openpty()
    with contextlib.ExitStack() as stack:
        stdout = theirs if answer_to is None else stack.enter_context(open(answer_to, "wb"))
        worker = subprocess.Popen(
            [sys.executable, "-m", "casstore", *arguments],
            stdout=stdout, stderr=theirs, stdin=theirs, env=environment(TERM="xterm", **more),
        )  # fmt: skip
    os.close(theirs)
    os.write(ours, typed)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(ours)
    worker.wait(60)
    return written.decode()


def test_colours_only_on_a_terminal_and_only_if_wanted(example: str) -> None:
    arguments = ("log", "agent", "--graph", "--store", example)
    assert "\x1b[" not in run(*arguments).out
    assert "\x1b[3" in on_terminal(*arguments)
    assert "\x1b[" not in on_terminal(*arguments, NO_COLOR="1")
    # A hostile id is escaped also where colours are printed.
    listed = on_terminal("sessions", "--store", example)
    assert "\x1b[31m\n" not in listed
    assert "evil\\x1b[31m\\nname\\u202e" in listed
    assert "\u202e" not in on_terminal("sessions", "--json", "--store", example)


def test_a_bar_is_drawn_on_a_terminal_and_taken_away_again(example: str) -> None:
    shown = on_terminal("check", "--store", example)
    assert "objects" in shown
    assert shown.rstrip().splitlines()[-1].count("sound") == 1
    assert "\x1b[2K" in shown
    assert "\x1b[2K" not in on_terminal("check", "--quiet", "--store", example)


@pytest.mark.parametrize(
    "arguments",
    [("prune", "--last", "1", "--dry-run"), ("check",), ("stats",), ("gc", "--dry-run"),
     ("export", "agent", "--list-have")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_the_output_goes_to_stdout_while_a_progress_bar_is_drawn(
    example: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Rich takes stdout over while it draws: a plan went to the terminal, not into its file."""
    answer = tmp_path / "answer"
    more = (str(tmp_path / "have"),) if arguments[0] == "export" else ()
    shown = on_terminal(*arguments, *more, "--json", "--store", example, answer_to=answer)
    assert json.loads(answer.read_text())["schema"] == f"casstore.{arguments[0]}/1"
    assert "schema" not in shown


def test_a_question_is_not_drawn_over_by_a_bar(own: str) -> None:
    with casstore.open(own) as store:
        store.session("other").add_subjects(["bob"])
    shown = on_terminal("erase", "bob", "--store", own, typed=b"n\n")
    assert "\x1b[2K" in shown
    _, asked, behind = shown.partition("Erase 1 session and 0 records about bob for good?")
    assert asked
    assert "\x1b[2K" not in behind
    assert run("sessions", "other", "--json", store=own).json["sessions"]


def test_a_confirmation_lists_everything_that_is_deleted(own: str) -> None:
    with casstore.open(own) as store:
        for at in range(8):
            store.create_session(f"old-{at}")
    names = [f"old-{at}" for at in range(8)]
    shown = on_terminal("delete", *names, "old-0", "--store", own, typed=b"n\n")
    assert "Delete old-0, old-1, old-2, old-3, old-4 and 3 other sessions for good?" in shown
    shown = on_terminal("delete", *names[:5], "--store", own, typed=b"n\n")
    assert "Delete old-0, old-1, old-2, old-3, old-4 for good?" in shown


def test_binary_is_not_written_to_a_terminal(example: str) -> None:
    assert "this is binary" in on_terminal("cat", "binary", "--store", example)
    assert "one\r\ntwo" in on_terminal("cat", "text", "--store", example)


def test_a_table_fits_the_terminal_and_cuts_text_but_no_id(own: str) -> None:
    long = "session-" + "0123456789" * 3
    with casstore.open(own) as store:
        text = {"role": "user", "text": "a long question " * 20}
        store.session(long).commit(Commit(append=[NodeDraft("n", text)]))
    shown = on_terminal("sessions", "--store", own, COLUMNS="110", NO_COLOR="1")
    assert all(len(line) <= 110 for line in shown.splitlines())
    assert long in shown
    assert re.search("a long question.*…", shown)
    # Where the ids alone are wider than the terminal, they are whole all the same.
    assert long in on_terminal("sessions", "--store", own, COLUMNS="40", NO_COLOR="1")


def test_long_text_goes_through_the_pager_on_a_terminal_only(own: str, tmp_path: Path) -> None:
    paged = tmp_path / "paged"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {paged}\n")
    pager.chmod(0o755)
    asked = ("log", "agent", "--payloads", "--limit", "0", "--store", own)
    environ: dict[str, Any] = {"PAGER": str(pager), "LINES": "10", "COLUMNS": "80"}
    assert "turn 5" not in on_terminal(*asked, **environ)
    text = paged.read_text()
    assert "turn 5" in text
    assert "\x1b[" in text
    paged.unlink()
    for given, more in (
        (("log", "agent", "-p", "-n", "0", "--no-pager", "--store", own), {}),
        (asked, {"PAGER": "cat"}),
        (asked, {"PAGER": ""}),
        (asked, {"LINES": "500"}),
        (asked, {"PAGER": str(tmp_path / "missing")}),
    ):
        assert "turn 5" in on_terminal(*given, **{**environ, **more})
    assert "turn 5" in run(*asked, env=environ).out
    assert not paged.exists()
    # Leaving the pager before the end is not an error.
    pager.write_text("#!/bin/sh\nexit 0\n")
    assert "error" not in on_terminal(*asked, **environ)


# --- what belongs to the command itself ------------------------------------------------------


def test_versions_are_reported() -> None:
    assert run("version", "--json").json["casstore"] == casstore.__version__
    assert run("version").out.startswith(f"casstore {casstore.__version__}\n")
    assert run("--version").out == f"casstore {casstore.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    script = run("completion", shell).out
    assert "_CASSTORE_COMPLETE" in script
    assert run("completion", shell, "--json").json["script"] in script


def test_completion_needs_a_shell_it_knows() -> None:
    assert "bash, zsh or fish" in run("completion", env={"SHELL": "/bin/ksh"}, ends=2).err
    assert run("completion", "--json", env={"SHELL": "/bin/zsh"}).json["shell"] == "zsh"


def completed(words: str, store: str) -> list[str]:
    """What bash would offer for the last of these words."""
    answer = subprocess.run(
        [sys.executable, "-c", "from casstore.cli.main import main; main()"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment(_CASSTORE_COMPLETE="bash_complete", COMP_WORDS=words,
                        COMP_CWORD=str(len(words.split(" ")) - 1), CASSTORE_PATH=store),
    )  # fmt: skip
    return [line.partition(",")[2] for line in answer.stdout.splitlines() if line]


def test_the_shell_completes_commands_options_and_names(example: str) -> None:
    assert completed("casstore hist", example) == ["history"]
    assert "--labelled" in completed("casstore history --lab", example)
    assert completed("casstore show a", example) == ["agent"]
    assert completed("casstore show re", example) == ["release", "resume"]
    # What cannot be typed as it is shown is not offered.
    assert completed("casstore show ev", example) == []
    assert completed("casstore show a", "/nowhere") == []


def test_the_shell_completes_labels_and_revisions_behind_a_session(example: str) -> None:
    assert completed("casstore show agent@m", example) == ["agent@middle"]
    assert completed("casstore show agent@1", example) == [
        f"agent@{revision}" for revision in (15, 14, 13, 12, 11, 10, 1)
    ]
    assert completed("casstore diff agent@3 agent@mid", example) == ["agent@middle"]
    assert completed("casstore show nothing@", example) == []


# --- streams that are closed, full, or cannot show a character --------------------------------


def in_shell(line: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell in which ``$CASSTORE`` is the command."""
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, check=False,
        env=environment(CASSTORE=f"{sys.executable} -m casstore", **more),
    )  # fmt: skip


def test_a_closed_stream_is_no_error_and_its_number_is_not_reused(example: str) -> None:
    # Its number must not go to a file of the store, or what is written there would land in it.
    look = f"{sys.executable} -c 'import os; from casstore.cli.output import prepare_streams as p;"
    look += " p(); os.fstat(1); os.fstat(2); assert os.open(os.devnull, 0) > 2'"
    for line in (
        "$CASSTORE sessions >&-",
        "$CASSTORE diff agent@2 agent --patch >&-",
        "$CASSTORE check 2>&-",
        "$CASSTORE sessions --json >&- 2>&- <&-",
        f"{look} >&- 2>&- <&-",
    ):
        ran = in_shell(line, CASSTORE_PATH=example)
        assert (ran.returncode, ran.stderr) == (0, b""), line
    assert in_shell("$CASSTORE show nowhere 2>&-", CASSTORE_PATH=example).returncode == 4
    assert in_shell("$CASSTORE show nowhere 2>/dev/full", CASSTORE_PATH=example).returncode == 4
    assert in_shell("$CASSTORE log agent -n 1 2>/dev/full", CASSTORE_PATH=example).returncode == 0


@pytest.mark.parametrize("arguments", ["sessions", "diff agent@2 agent --patch", "--help"])
def test_an_answer_that_cannot_be_written_is_reported(example: str, arguments: str) -> None:
    ran = in_shell(f"$CASSTORE {arguments} >/dev/full", CASSTORE_PATH=example)
    assert ran.returncode == 10
    assert ran.stderr.startswith(b"error: cannot write the answer: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    ["cat binary -o {}", "cat long -o {}", "cat long --json -o {}", "export agent {} --list-have",
     "prune --last 1 --dry-run --plan {}", "export agent {}"],
)  # fmt: skip
def test_a_file_that_cannot_be_written_whole_does_not_stay(
    own: str, tmp_path: Path, arguments: str
) -> None:
    """A part of a plan or a blob, left behind, was taken for all of it."""
    with casstore.open(own) as store:
        store.tag("long", store.put_value(["entry"] * 20_000))
        for at in range(20):
            node = NodeDraft(f"more{at}", at)
            store.session("agent").commit(Commit(append=[node], label="l" * 500))
    place = tmp_path / "into"
    place.mkdir()
    # The system takes no more than a block of one KiB into a file.
    line = f"ulimit -f 1; $CASSTORE {arguments.format(place / 'file')}"
    ran = in_shell(line, CASSTORE_PATH=own)
    assert ran.returncode == 10, ran
    assert f"cannot write {place / 'file'}: File too large" in ran.stderr.decode()
    assert os.listdir(place) == []


def test_a_file_that_is_replaced_stays_until_the_new_one_is_whole(own: str, tmp_path: Path) -> None:
    place = tmp_path / "into"
    place.mkdir()
    (place / "file").write_text("precious")
    (place / "file").chmod(0o640)
    (place / "link").symlink_to("file")
    for arguments in (f"cat binary -o {place}/file --force", f"cat binary -fo {place}/link"):
        ran = in_shell(f"ulimit -f 1; $CASSTORE {arguments}", CASSTORE_PATH=own)
        assert ran.returncode == 10, ran
        assert (place / "file").read_text() == "precious"
    run("cat", "text", "--force", "--output", str(place / "link"), store=own)
    assert (place / "file").read_bytes() == b"one\ntwo\nthree\n"
    assert (place / "file").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(place)) == ["file", "link"]
    told = run("cat", "text", "-fo", "/dev/full", store=own, ends=10).err
    assert "cannot write /dev/full: No space left on device" in told
    run("cat", "text", "-fo", "/dev/null", store=own)


def test_an_internal_error_exits_70_with_a_traceback(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_fault(*_: object, **__: object) -> None:
        raise RuntimeError("what should not happen")

    monkeypatch.setattr("casstore.maintenance.check.check", at_fault)
    ran = run("check", store=example, ends=70)
    assert "Traceback" in ran.err
    assert "casstore itself is at fault: RuntimeError: what should not happen" in ran.err
    assert "Traceback" in run("check", "--json", store=example, ends=70).error["message"]


# What JSON leaves as it is and a terminal does not: a C1 control, DEL, a bidi override, a line end
# of Unicode, a tag of a flag beyond 16 bits; and letters that ASCII lacks.
ODD = "\x9b31m \x7f \u202e \u2028 \U000e0067 é 😀"


@pytest.fixture
def odd(own: str) -> str:
    with casstore.open(own) as store:
        store.tag("odd", store.put_value({ODD: [ODD]}))
        store.tag("even", store.put_value({ODD: ["even"]}))
        store.tag("late", store.put_blob(b"x" * (1 << 20) + b"\x1b[31m"))
        store.tag("split", store.put_blob(b"x" * ((1 << 20) - 1) + b"\xc2\x9b31m"))
        store.tag("turned", store.put_blob("a \u202e b".encode()))
        store.tag("family", store.put_blob("👨\u200d👩\u200d👧 é\n".encode()))
    return own


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments", ["cat odd", "cat odd --json", "show odd --json", "diff even odd --patch"]
)
def test_json_is_json_in_every_encoding(odd: str, arguments: str, encoding: str) -> None:
    line = f"$CASSTORE {arguments}"
    ran = in_shell(line, CASSTORE_PATH=odd, PYTHONIOENCODING=encoding)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.decode(encoding))
    value = told[0]["value"] if "diff" in arguments else told.get("value", told)[ODD][0]
    assert value == ODD


def test_an_error_is_json_in_every_encoding(odd: str) -> None:
    line = "$CASSTORE show nowhere-é --json"
    ran = in_shell(line, CASSTORE_PATH=odd, PYTHONIOENCODING="ascii")
    assert "nowhere-é" in json.loads(ran.stderr)["message"]


def test_patches_and_texts_print_no_terminal_control_characters(odd: str) -> None:
    for arguments in (("diff", "even", "odd", "--patch"), ("cat", "odd"), ("show", "odd")):
        shown = on_terminal(*arguments, "--store", odd, NO_COLOR="1")
        assert not re.search("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202e\u2028\U000e0067]", shown)
        assert "u202e" in shown
    for text in ("late", "split", "turned"):
        shown = on_terminal("cat", text, "--store", odd, NO_COLOR="1")
        assert "this is binary" in shown
        assert not re.search("[\x1b\x9b\u202e]", shown)
    assert "👨\u200d👩\u200d👧 é" in on_terminal("cat", "family", "--store", odd)
    assert "\x1b[31m" in on_terminal("cat", "late", "--force", "--store", odd)


def test_a_store_given_as_an_argument_suggests_the_option_that_names_it(own: str) -> None:
    for name in ("check", "stats", "gc", "compact"):
        assert f"try: casstore {name} --store {own}" in run(name, own, ends=2).err
    assert "try: casstore check --help" in run("check", "nothing-here", ends=2).err
    assert "try: casstore check --help" in run("check", own, own, ends=2).err


def test_a_refused_lease_suggests_how_to_end_it(own: str) -> None:
    with casstore.open(own) as store:
        store.session("held").append("first")
        assert store.session("held").claim_lease("worker-7", ttl_ms=600_000)
    told = run("rewind", "held@1", store=own, ends=5).err
    assert "leased by 'worker-7'" in told
    assert "casstore leases --release held" in told


def test_a_refused_deletion_says_how_to_confirm_it(own: str) -> None:
    with casstore.open(own) as store:
        store.session("old").append("first")
    assert "add --yes to confirm" in run("delete", "old", store=own, ends=2).err


def test_a_wrong_command_of_a_group_is_named_as_its_help_names_it() -> None:
    assert "No such command 'snapshots'" in run("workspace", "snapshots", ends=2).err
    assert "No such kind 'lsh'" in run("import", "lsh", ends=2).err


def test_the_log_of_a_session_without_nodes_says_so(own: str) -> None:
    with casstore.open(own) as store:
        store.session("files-only").append(tool_state={"n": 1})
    ran = run("log", "files-only", store=own)
    assert (ran.out, ran.err) == ("", "no nodes\n")


def test_a_directory_that_is_not_there_gets_a_remedy(own: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    told = run("workspace", "snapshot", nowhere, "--session", "s", store=own, ends=4).err
    assert "try: name an existing directory" in told
    wrong = run("workspace", "snapshot", str(tmp_path), "--session", "", store=own, ends=3).err
    assert "try: casstore workspace snapshot --help" in wrong


def test_a_number_out_of_bounds_is_refused_with_the_bounds(own: str) -> None:
    err = run("ui", "--port", "abc", store=own, ends=2).err
    assert "must be a whole number from 0 to 65535, got 'abc'" in err
    err = run("sessions", "--limit", "-1", store=own, ends=2).err
    assert "must be a whole number of at least 0, got '-1'" in err
