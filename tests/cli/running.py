"""Running the command line in this process, and a store to run it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

import casstore
from casstore import Checkpoint, Commit, NodeDraft, Usage
from casstore.cli.main import cli


class Ran(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str
    raw: bytes

    @property
    def json(self) -> Any:
        """The JSON document on stdout: one, and nothing else."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The JSON document on stderr."""
        return json.loads(self.err)


def run(
    *arguments: str,
    store: str | None = None,
    stdin: bytes | None = None,
    env: dict[str, str | None] | None = None,
    ends: int | None = 0,
) -> Ran:
    """Run a command; it must end with ``ends``, unless that is None."""
    given = {"CASSTORE_PATH": store, **(env or {})}
    result = CliRunner().invoke(cli, list(arguments), input=stdin, env=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    ran = Ran(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)
    assert ends is None or ran.code == ends, (arguments, ran)
    return ran


def counts(report: Any) -> dict[str, tuple[int, int, int]]:
    """Found, imported and updated rows of each part of an import's JSON."""
    return {
        part["name"]: (part["found"], part["imported"], part["updated"]) for part in report["parts"]
    }


HOSTILE = "evil\x1b[31m\nname\u202e"


def said(node: str, role: str, text: str, **more: Any) -> NodeDraft:
    """A message."""
    return NodeDraft(node, {"role": role, "text": text}, **more)


def fill(place: Path) -> None:
    """Fill a store: a session with branches, two forks of it, a rewind, names, odd ids."""
    with casstore.open(place, durability="relaxed") as store:
        agent = store.session("agent")
        for turn in range(12):
            files = {f"f{at}.py": {"size": at * turn, "text": "line\n" * at} for at in range(8)}
            agent.commit(
                Commit(
                    append=[
                        said(f"n{turn}", "user" if turn % 2 == 0 else "assistant", f"turn {turn}")
                    ],
                    checkpoint=Checkpoint(
                        turn_state={"turn": turn},
                        tool_state={"cwd": "/repo", "files": files},
                        config={"model": "made-up"},
                    ),
                    usage=[Usage("agent", "made-up", input=10, output=2)],
                    turn=f"t{turn}",
                )
            )
        agent.label("middle", 6)
        agent.commit(Commit(append=[said("b1", "user", "another way", parent="n7")]))
        store.fork("agent", "other", at=10)
        store.session("other").commit(Commit(append=[said("o1", "user", "the fork says")]))
        store.fork("agent", "third", at=4)
        store.session("third").commit(Commit(append=[NodeDraft("t1", "plain")]))
        agent.rewind(9)
        agent.commit(Commit(append=[said("r1", "user", "after the rewind")]))
        store.tag("release", agent.entry(5).manifest, note="what we shipped")
        store.pin("resume", agent.entry(3).manifest, ttl_ms=3_600_000)
        store.session(HOSTILE).commit(
            Commit(append=[said("e\x07", "us\x1ber", "\x1b]0;pwned\x07 hi")])
        )
        store.create_session("empty", name="nothing yet", subjects=["nobody"])
        store.tag("note", store.put_value({"plan": ["read", "edit"], "bytes": b"\0\1"}))
        store.tag("text", store.put_blob(b"one\ntwo\nthree\n"))
        store.tag("binary", store.put_blob(bytes(range(256)) * 500))
