"""``tools/callpaths.py`` counts the functions of casstore that a call passes through."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
from callpaths import Called, count_calls, main, operations

from casstore.session.keys import id_bytes, session_key

ID_BYTES = Called("session/keys.py", "id_bytes")


def test_a_function_is_counted_once_for_each_call_and_others_are_left_out() -> None:
    def run() -> None:
        id_bytes("a", "an id")
        id_bytes("b", "an id")
        sorted([3, 1, 2], key=lambda number: -number)

    assert count_calls(run) == {ID_BYTES: 2}


def test_calls_of_other_threads_are_not_counted() -> None:
    def run() -> None:
        other = threading.Thread(target=session_key, args=("session",))
        other.start()
        other.join()

    assert count_calls(run) == {}


def test_a_comprehension_belongs_to_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callpaths._PACKAGE", f"{__file__.rpartition('/')[0]}/")

    def run() -> None:
        assert sum(sum(number for number in (one, one)) for one in (1, 2)) == 6

    assert {called.function.rpartition(".")[2] for called in count_calls(run)} == {"run"}


def test_every_operation_can_be_counted_alone_and_reaches_the_engine() -> None:
    with operations() as every:
        assert [operation.name for operation in every][:4] == [
            "commit",
            "put_value",
            "load",
            "fork",
        ]
        for operation in reversed(every):
            modules = {called.module for called in count_calls(partial(operation.run, 0))}
            assert "engine/lmdb/engine.py" in modules, operation.name


def test_an_unknown_operation_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["callpaths.py", "sing"])
    with pytest.raises(SystemExit):
        main()
    assert "operation must be one of commit, put_value" in capsys.readouterr().err
