"""``casstore import jsonl``: a transcript becomes a session."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import counts, run

LINES = [
    {"role": "user", "content": "read the file"},
    {"role": "assistant", "content": "done"},
]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_transcript_becomes_a_session(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    file = write(tmp_path / "talk.jsonl", *LINES)
    told = run("import", "jsonl", file, "--name", "talk", "--json", store=place).json
    assert (told["sessions"][0]["session"], counts(told)) == ("talk", {"messages": (2, 2, 0)})
    again = run("import", "jsonl", file, "--name", "talk", "--format", "messages", store=place).out
    assert "imported 0 of 2 messages" in again


def test_a_bad_line_is_reported_by_its_number_and_left_out_when_asked(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    file = write(tmp_path / "talk.jsonl", *LINES)
    with Path(file).open("a") as more:
        more.write("{not json\n")
    refused = run("import", "jsonl", file, "--name", "talk", store=place, ends=3)
    assert "line 3" in refused.err
    assert run("sessions", "--json", store=place).json["sessions"] == []
    told = run("import", "jsonl", file, "--name", "talk", "--leave-out-damaged", store=place).out
    assert "note: 1 lines that cannot be read, left out (the first: line 3)" in told
