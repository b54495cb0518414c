"""Nodes that a tombstone hides are shown as hidden, and nothing that they say is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore import Commit
from tests.cli.running import run, said
from tests.cli.test_endings import ROOT, environment

SECRET = "my password is swordfish"


class Hidden:
    """A store in which the session ``agent`` hides the node ``bad``."""

    def __init__(self, path: str) -> None:
        self.path = path
        with casstore.open(path) as store:
            session = store.session("agent")
            session.commit(Commit(append=[said("bad", "user", SECRET)]))
            self.digest = session.nodes()[-1].digest.hex()
            self.seen = session.nodes()[-2].digest.hex()
            head = session.head()
            assert head is not None
            self.manifest = head.manifest
            store.fork("agent", "fork")
            session.tombstone(["bad"])


@pytest.fixture
def hidden(own: str) -> Hidden:
    return Hidden(own)


def both(*arguments: str, store: str) -> tuple[str, str]:
    """What a command prints as text, and as JSON."""
    return run(*arguments, store=store).out, run(*arguments, "--json", store=store).out


def test_show_says_of_a_hidden_node_only_that_it_is_hidden(hidden: Hidden) -> None:
    text, document = both("show", hidden.digest, store=hidden.path)
    assert "hidden by a tombstone" in text
    assert "swordfish" not in text + document
    shown = json.loads(document)
    assert (shown["node"]["hidden"], shown["node"]["payload"], shown["links"]) == (True, None, [])
    assert json.loads(run("show", hidden.seen, "--json", store=hidden.path).out)["node"]["payload"]
    by_id = run("show", "agent#bad", store=hidden.path, ends=4).err
    assert "node 'bad' of session 'agent' is hidden by a tombstone" in by_id
    assert "leaf bad (hidden)" in run("show", "agent", store=hidden.path).out


def test_cat_prints_nothing_that_a_hidden_node_says(hidden: Hidden) -> None:
    for arguments in (("cat", hidden.digest), ("cat", hidden.digest, "--path", "payload")):
        assert "swordfish" not in "".join(both(*arguments, store=hidden.path))
    assert json.loads(run("cat", hidden.digest, store=hidden.path).out)["hidden"] is True


def test_a_fork_that_shows_the_node_still_does(hidden: Hidden) -> None:
    assert "swordfish" in run("show", "fork#bad", store=hidden.path).out
    assert "swordfish" in run("diff", "agent@13", "fork", store=hidden.path).out


def test_diff_lists_a_hidden_node_without_its_content(hidden: Hidden) -> None:
    text, document = both("diff", "agent~1", "agent", store=hidden.path)
    assert "+ bad  (hidden)" in text
    [added] = json.loads(document)["nodes"]["added"]
    assert (added["id"], added["hidden"], added["summary"]) == ("bad", True, None)
    patch = run("diff", "agent~1", "agent", "--patch", store=hidden.path).out
    [node] = [one["value"] for one in json.loads(patch) if one["path"] == "/nodes/bad"]
    assert (node["hidden"], node["payload"]) == (True, None)
    nodes = both("diff", hidden.seen, hidden.digest, store=hidden.path)
    assert "swordfish" not in "".join((text, document, patch, *nodes))


def test_snapshot_diff_lists_a_hidden_node_without_its_content(
    hidden: Hidden, tmp_path: Path
) -> None:
    bundle = str(tmp_path / "hidden.bundle")
    run("export", "agent", bundle, store=hidden.path)
    program = str(ROOT / "tools" / "snapshot_diff.py")
    for new in (f"{hidden.path}::agent", bundle):
        for option in ("--json", "--patch", "--full"):
            answer = subprocess.run(
                [sys.executable, program, f"{hidden.path}::agent~1", new, option],
                capture_output=True, text=True, check=True, env=environment(),
            )  # fmt: skip
            assert "swordfish" not in answer.stdout
            assert "bad" in answer.stdout


def test_vacuum_names_what_retains_hidden_nodes_every_time(hidden: Hidden) -> None:
    with casstore.open(hidden.path) as store:
        store.tag("kept", hidden.manifest)
        store.delete_session("fork")
    told = [run("vacuum", "--grace", "0", store=hidden.path).out for _ in range(3)]
    assert ["nothing to do" in one.splitlines()[0] for one in told] == [False, True, True]
    for one in told:
        assert "still stored, kept by:\n    pin kept\n" in one
    # Of a manifest without a session it is hidden as well, though no session hides it any more.
    text, document = both("diff", "agent", "kept", store=hidden.path)
    assert "+ bad  (hidden)" in text
    assert "swordfish" not in text + document + run("show", hidden.digest, store=hidden.path).out
    run("tag", "--delete", "kept", store=hidden.path)
    gone = run("vacuum", "--grace", "0", "--json", store=hidden.path).json
    assert (gone["objects_kept"], gone["keepers"]) == (0, [])
    with casstore.open(hidden.path) as store:
        keys = [row.key for row in store.engine.scan_rows("records")]
        assert [key for key in keys if key.startswith(b"vacuum")] == []
