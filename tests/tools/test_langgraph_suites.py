"""The command that runs LangGraph's own store tests."""

from __future__ import annotations

from pathlib import Path

import langgraph_suites
import pytest


def test_a_directory_that_is_no_clone_of_langgraph_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        langgraph_suites.main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} has no libs/checkpoint" in capsys.readouterr().err


def test_a_connection_string_leads_to_the_same_store_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASSTORE_SUITES_SCRATCH", str(tmp_path))
    monkeypatch.setenv("CASSTORE_SUITES_ENGINE", "lmdb")
    url = "postgres://postgres:postgres@localhost:5441/test_1?sslmode=disable"
    assert langgraph_suites._address(url) == str(tmp_path / "test_1")
    assert langgraph_suites._address("/tmp/file") == str(tmp_path / "file")
    assert langgraph_suites._address(":memory:") != langgraph_suites._address(":memory:")
    monkeypatch.setenv("CASSTORE_SUITES_ENGINE", "postgres")
    assert langgraph_suites._address(url) == url


def test_every_excluded_test_is_in_a_file_of_its_suite() -> None:
    for one in langgraph_suites.EXCLUDED:
        assert one.test.partition("::")[0] in langgraph_suites.SUITES[one.package].files
        assert one.reason
