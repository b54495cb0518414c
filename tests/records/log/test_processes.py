"""Real processes on one store: nothing is lost, numbers have no gap, one of two wins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore.records.log import NewMessage, SessionLog, UsageTotals

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def log(place: str) -> Iterator[SessionLog]:
    """The log of the store in which the processes work, open all the while."""
    with casstore.open(place, "relaxed") as store:
        yield SessionLog(store)


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a program in a process of its own."""
    head = (
        "import json, sys, casstore\n"
        "from casstore.records.log import *\n"
        "from casstore import errors\n"
        "store = casstore.open(sys.argv[1], 'relaxed')\n"
        "log = SessionLog(store)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def together(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """Let them begin at the same time; what each printed last."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


APPEND = """
name = sys.argv[2]
numbers = [
    log.append('s', NewMessage('user', f'{name} {at}'), tokens=Tokens(1, 1, 2))
    for at in range(200)
]
print(json.dumps(numbers))
"""


def test_two_processes_append_200_messages_each_without_a_failure(
    place: str, log: SessionLog
) -> None:
    log.create("s")
    numbers = together([start(APPEND, place, "a"), start(APPEND, place, "b")])
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 401))
    texts = [one.content for one in log.messages("s")]
    for name in "ab":
        own = [text for text in texts if text.startswith(name)]
        assert own == [f"{name} {at}" for at in range(200)]
    # Who has the store open all the while goes on behind them.
    assert log.append("s", NewMessage("user", "after")) == 401
    assert log.totals("s") == UsageTotals(1, 1, 1, 2)


FOLD = """
folded = 0
for at in range(30):
    log.append('s', NewMessage('user', f'{sys.argv[2]} {at}'))
    shown = [one.number for one in log.active('s')]
    try:
        log.fold('s', shown[1:4], 'note')
        folded += 1
    except errors.InvalidInputError:
        pass  # the other has folded one of them meanwhile, or they lack the note
print(json.dumps(folded))
"""


def test_two_processes_fold_concurrently_and_each_message_once(place: str, log: SessionLog) -> None:
    log.create("s")
    log.extend("s", [NewMessage("user", f"m{at}") for at in range(4)])
    folded = sum(together([start(FOLD, place, "a"), start(FOLD, place, "b")]))
    folds = log.folds("s")
    assert [fold.number for fold in folds] == list(range(1, folded + 1))
    away = [number for fold in folds for number in fold.messages]
    assert len(away) == len(set(away))
    everyone = list(log.messages("s"))
    assert [one.number for one in everyone] == list(range(1, 65 + folded))
    assert {one.number for one in everyone if one.state == "compacted_out"} == set(away)
    assert sorted(one.number for one in log.active("s")) == sorted(
        set(range(1, 65 + folded)) - set(away)
    )
    assert sum(one.name == "compact_note" for one in log.active("s")) == 1


CREATE = """
won = 0
for at in range(20):
    try:
        log.create(f's{at}')
        won += 1
    except errors.SessionExistsError:
        pass
for at in range(20):
    log.create(f'{sys.argv[2]}{at}', parent='p', lifecycle='linked')
print(json.dumps(won))
"""


def test_one_of_two_processes_makes_a_session_and_both_make_children(
    place: str, log: SessionLog
) -> None:
    log.create("p")
    won = together([start(CREATE, place, "a"), start(CREATE, place, "b")])
    assert sum(won) == 20
    children = [one.id for one in log.children("p")]
    for name in "ab":
        assert [each for each in children if each[0] == name] == [f"{name}{at}" for at in range(20)]
    assert log.close("p") == 41


LEASE = """
taken = []
for item in range(10):
    log.put_inbox('s', f'i{item}', NewMessage('user', f'i{item}'))
for _ in range(200):
    lease = log.claim_lease('s', sys.argv[2], 60_000)
    if lease is not None:
        taken += log.deliver_inbox('s', lease, limit=2)
        log.release_lease(lease)
print(json.dumps(taken))
"""


def test_two_processes_share_a_lease_and_deliver_each_item_once(
    place: str, log: SessionLog
) -> None:
    log.create("s")
    one, other = together([start(LEASE, place, "a"), start(LEASE, place, "b")])
    lease = log.claim_lease("s", "rest", 60_000)
    assert lease is not None
    rest = log.deliver_inbox("s", lease)
    assert sorted(one + other + rest) == list(range(1, 11))
    contents = sorted(str(one.content) for one in log.active("s"))
    assert contents == sorted(f"i{at}" for at in range(10))


KILLED = """
import os
log.send('s', NewMessage('user', 'do it'))
calls = [{'id': f'c{at}', 'name': 'tool', 'arguments': {'at': at}} for at in range(3)]
log.append('s', NewMessage('assistant', tool_calls=calls, round=0), tokens=Tokens(1, 2, 3))
log.append('s', NewMessage('tool', 'done', tool_call_id='c0'))
os.kill(os.getpid(), 9)
"""


def test_persistence__another_process_continues_after_one_was_killed(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    with casstore.open(place, "relaxed") as store:
        SessionLog(store).create("s")
    process = start(KILLED, place)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.communicate("go\n", timeout=60)
    assert process.returncode == -9
    with casstore.open(place, "relaxed") as store:
        log = SessionLog(store)
        pending = log.pending("s")
        assert pending is not None
        assert [call["arguments"] for call in pending.calls] == [{"at": 1}, {"at": 2}]
        assert log.resume("s", lambda call: f"done {call['arguments']['at']}") == [4, 5]
        assert log.totals("s") == UsageTotals(1, 1, 2, 3)
        assert log.append("s", NewMessage("assistant", "all done")) == 6
