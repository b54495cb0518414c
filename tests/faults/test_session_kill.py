"""Killed agent runtimes, sampled; ``tools/torture.py sessions`` kills by the hundred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import casstore
from campaigns import care, session_examiner, session_kill
from campaigns.replay import Violation
from campaigns.session_journal import Journal, path_of, read
from campaigns.session_turns import Turn
from casstore.errors import LeaseLostError


def test_killed_runtimes_lose_no_turn_and_repeat_none(scratch: Path) -> None:
    report = session_kill.run(scratch, count=9, seed=3, kills_per_store=3)
    assert report.findings == ()
    assert report.kept()
    assert report.trials == 9
    assert report.total("sound (plain)") > 0
    assert report.total("sound (verify)") == 3
    assert report.total("turns answered, there") > 10
    for durability in session_kill.DURABILITIES:
        assert report.total(f"{durability}: stores") >= 1


def test_killing_agents_and_maintenance_processes_loses_nothing(
    scratch: Path,
) -> None:
    place = scratch / "care"
    place.mkdir()
    report = care.run(place, count=6, seed=5, kills_per_store=3)
    assert report.findings == ()
    assert report.kept()
    assert report.total("keepers killed") >= 4
    # Each time that all were killed, the store was checked whole.
    assert report.total("sound (verify)") >= 2
    assert report.total("sound (plain)") == 0


# --- the examiner can fail ----------------------------------------------------------------------

TURN = Turn("alpha", "t1", (), (), "after t1")


class Told:
    """A journal written by hand, and the examiner's verdict on it."""

    def __init__(self, place: Path) -> None:
        self.store = place / "store"
        self.journals = place / "journals"
        self.journals.mkdir()
        self.journal = Journal(path_of(self.journals, "w0", 0))

    def say(self, op: str, asked: dict[str, Any], answer: object) -> None:
        """Claim that a call was answered so."""
        self.journal.call(op, asked, lambda: answer, lambda told: told)

    def turn(self, answer: object, attempt: int = 1) -> None:
        """Claim that the turn was answered so."""
        asked = {"session": "alpha", "turn": "t1", "attempt": attempt, "parent": None,
                 "batches": [], "attachments": [], "label": TURN.label, "late": False}  # fmt: skip
        self.say("turn", asked, answer)

    def verdict(self) -> str:
        """What the examiner says."""
        return session_examiner.check(self.store, [str(self.journals), "relaxed", "plain"])


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def commit(told: Told, turn: Turn = TURN, attempt: int = 1) -> list[Any]:
    """Commit the turn for real; what a worker writes down of the answer."""
    with casstore.open(told.store, "relaxed") as store:
        result = store.session("alpha").commit(turn.commit(attempt)._replace())
    return [result.revision, str(result.manifest), result.leaf, result.nodes, result.replayed]


def test_the_checker_accepts_a_journal_that_matches_the_store(told: Told) -> None:
    told.turn(commit(told))
    assert "turns_answered,_there=1" in told.verdict()


def test_the_checker_reports_a_lost_turn(told: Told) -> None:
    told.turn([1, "00" * 32, "t1.1.0", ["t1.1.0"], False])
    with pytest.raises(Violation, match=r"^lost: "):
        told.verdict()


def test_the_checker_reports_a_turn_that_no_worker_committed(told: Told) -> None:
    commit(told)
    with pytest.raises(Violation, match=r"^unasked: "):
        told.verdict()


def test_the_checker_reports_a_turn_with_other_content(told: Told) -> None:
    told.turn(commit(told, TURN._replace(label=None)))
    with pytest.raises(Violation, match="TurnConflictError"):
        told.verdict()


def test_the_checker_reports_a_turn_done_twice(told: Told) -> None:
    answer = commit(told)
    told.turn(answer)
    told.turn(answer, attempt=2)
    with pytest.raises(Violation, match=r"^done twice: "):
        told.verdict()


def test_the_checker_reports_lost_work(told: Told) -> None:
    asked = {"session": "alpha", "source_key": "k", "attempt": 1, "batch": "k/1"}
    told.say("enqueue", asked, "k/1")
    with pytest.raises(Violation, match=r"^queue: .* not queued"):
        told.verdict()


def test_the_checker_reports_a_fencing_number_that_decreases(told: Told) -> None:
    told.say("lease", {"session": "alpha"}, 2)
    told.say("lease", {"session": "alpha"}, 1)
    with pytest.raises(Violation, match=r"^fencing: "):
        told.verdict()


def test_a_truncated_journal_line_counts_as_an_unknown_outcome(told: Told) -> None:
    told.say("pack", {}, None)
    path = path_of(told.journals, "w0", 0)
    whole = path.read_bytes()
    lines = whole.splitlines()
    assert [json.loads(line)["ns"] > 0 for line in lines] == [True, True]
    path.write_bytes(whole[:-1])
    assert [call.unknown for call in read(told.journals)] == [True]
    path.write_bytes(lines[0])
    assert read(told.journals) == []


def test_the_journal_records_a_refused_call(told: Told) -> None:
    def refuse() -> None:
        raise LeaseLostError("alpha", "it is over")

    with pytest.raises(LeaseLostError):
        told.journal.call("turn", {}, refuse)
    [call] = read(told.journals)
    assert (call.refused, call.done, call.unknown) == ("LeaseLostError", False, False)
