"""Record systems on the command line: listed, with their entries; named when not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from casstore.records.log import SessionLog
from casstore.records.runs import Runs
from casstore.session.records import Draft, Table
from tests.cli.running import run

NOT_REGISTERED = "no installed package registers it"


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A store with a log of two sessions, a thread of runs, and rows of an unknown system."""
    path = tmp_path / "store"
    with casstore.open(path) as store:
        log = SessionLog(store)
        log.create("chat 1")
        log.create("chat 2")
        Runs(store).create_thread("t", "helper")
        draft = Draft(store)
        draft.put(Table(store, "notes.pages", 1), ("anna",), "hello")
        draft.commit()
    return str(path)


def test_systems_and_their_entries_are_listed(place: str) -> None:
    listed = run("records", "--json", store=place).json
    assert [(one["name"], one["title"]) for one in listed["systems"]] == [
        ("log", "Session log"), ("notes", None), ("runs", "Runs"),
    ]  # fmt: skip
    assert listed["entries"] == []
    page = run("records", "log", "--limit", "1", "--json", store=place).json["entries"]
    assert [one["id"] for one in page] == ["chat 1"]
    assert page[0]["changed_at"].endswith("Z")
    cut = run("records", "log", "--limit", "1", store=place)
    assert "--after continues" in cut.err
    rest = run("records", "log", "--after", "chat 1", store=place).out
    assert "chat 2" in rest
    assert "chat 1" not in rest
    assert "no entries of log" in run("records", "log", "--after", "chat 2", store=place).err
    assert "Session log" in run("records", store=place).out
    assert "name the system" in run("records", "--after", "x", store=place, ends=3).err


def test_a_store_without_records_says_so(tmp_path: Path) -> None:
    casstore.open(tmp_path / "store").close()
    assert "no records yet" in run("records", store=str(tmp_path / "store")).err


def test_systems_that_are_not_installed_are_named(place: str) -> None:
    assert f"not installed: {NOT_REGISTERED}" in run("records", store=place).out
    refused = run("records", "notes", store=place, ends=3).err
    assert f"record system 'notes' is not installed: {NOT_REGISTERED}" in refused
    stats = run("stats", "--json", store=place).json["systems"]
    assert [(one["name"], one["rows"], one["missing"]) for one in stats if one["missing"]] == [
        ("notes", 1, NOT_REGISTERED)
    ]
    assert "not installed" in run("stats", store=place).out
    sessions = run("sessions", "--json", store=place).json
    assert (sessions["systems"], sessions["missing_systems"]) == (
        ["log", "notes", "runs"], ["notes"],
    )  # fmt: skip
    assert "notes (not installed)" in run("sessions", store=place).err
    assert run("gc", "--json", store=place).json["missing_systems"] == ["notes"]
    assert "records of notes, not installed" in run("gc", store=place).out
    told = [{"name": "notes", "why": NOT_REGISTERED}]
    assert (
        run("prune", "--last", "5", "--yes", "--json", store=place).json["missing_systems"] == told
    )
    assert "record system notes" in run("prune", "--last", "5", "--yes", store=place).out
    assert "notes.pages" in run("check", store=place).out
    with casstore.open(place) as store:
        store.create_session("s", subjects=["anna"])
    assert run("erase", "anna", "--dry-run", "--json", store=place).json["missing_systems"] == told
    assert "record system notes" in run("erase", "anna", "--yes", store=place).out
