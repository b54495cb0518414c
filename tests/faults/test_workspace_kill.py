"""A sample of the campaign ``tools/torture.py workspace``."""

from __future__ import annotations

from pathlib import Path

from campaigns import workspace_kill


def test_a_killed_process_leaves_conversation_and_files_of_the_same_revision(
    tmp_path: Path,
) -> None:
    report = workspace_kill.run(tmp_path, count=4, seed=7)
    assert report.findings == ()
    assert report.trials == 4
    assert report.total("revisions restored") > 0
