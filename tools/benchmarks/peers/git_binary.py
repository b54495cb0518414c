"""git, by its own program: a branch a session, a commit a turn, a file a message.

A turn is one process, ``git fast-import``, and everything it writes is flushed. A program that
links a git library would not pay for the process.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Flush, Peer, Turn

# Files of one directory, so that a commit does not rewrite a list of all messages.
_DIRECTORY = 64
_QUIET = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


class Git(Peer):
    """A bare repository."""

    name = "git"
    flush = Flush.EACH
    needs = ("!git",)

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def start(self, place: Path) -> None:
        """Make the repository if it is not there."""
        self._repository = place / "repository"
        if not self._repository.exists():
            self._git("init", "--quiet", "--bare", "--template=", str(self._repository), at=place)

    def stop(self) -> None:
        """Nothing is open."""

    def _git(self, *arguments: str, given: bytes = b"", at: Path | None = None) -> bytes:
        command = ["git", "-c", "core.fsync=all", "-c", "gc.auto=0", *arguments]
        where = at or self._repository
        return subprocess.run(
            command, cwd=where, input=given, stdout=subprocess.PIPE, check=True,
            env=os.environ | _QUIET,
        ).stdout  # fmt: skip

    def _steps(self, source: str, target: str, turns: Sequence[Turn]) -> Iterable[bytes]:
        at = self._lengths.get(source, 0)
        for number, turn in enumerate(turns):
            yield b"commit refs/heads/%s\ncommitter a <a> 1700000000 +0000\ndata 0\n" % (
                target.encode()
            )
            if at and number == 0:
                yield b"from refs/heads/%s^0\n" % source.encode()
            for message in turn:
                content = json.dumps(message).encode()
                yield b"M 100644 inline %d/%d\ndata %d\n%s\n" % (
                    at // _DIRECTORY, at % _DIRECTORY, len(content), content,
                )  # fmt: skip
                at += 1
        self._lengths[target] = at

    def commit(self, session: str, turn: Turn) -> None:
        """One process."""
        self.branch(session, session, turn)

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One process for all, a commit a turn."""
        steps = [step for name in sessions for step in self._steps(name, name, sessions[name])]
        self._git("fast-import", "--quiet", given=b"".join(steps))

    def path(self, session: str) -> Sequence[Any]:
        """List the files, then read them all through one process."""
        listed = self._git("ls-tree", "-r", f"refs/heads/{session}").splitlines()
        rows = [line.split(b"\t") for line in listed]
        rows.sort(key=lambda row: [int(part) for part in row[1].split(b"/")])
        wanted = b"".join(row[0].split()[2] + b"\n" for row in rows)
        answer = self._git("cat-file", "--batch", given=wanted)
        found: list[Any] = []
        at = 0
        while at < len(answer):
            end = answer.index(b"\n", at)
            size = int(answer[at:end].rsplit(b" ", 1)[1])
            found.append(json.loads(answer[end + 1 : end + 1 + size]))
            at = end + size + 2
        return found

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """The state as one file."""
        content = json.dumps(dict(state), indent=0).encode()
        begun = b"from refs/heads/%s^0\n" % session.encode() if session in self._lengths else b""
        self._lengths.setdefault(session, 0)
        self._git(
            "fast-import", "--quiet",
            given=b"commit refs/heads/%s\ncommitter a <a> 1700000000 +0000\ndata 0\n%s"
            b"M 100644 inline state.json\ndata %d\n%s\n"
            % (session.encode(), begun, len(content), content),
        )  # fmt: skip

    def fork(self, source: str, target: str) -> None:
        """One ref."""
        self._git("update-ref", f"refs/heads/{target}", f"refs/heads/{source}")
        self._lengths[target] = self._lengths[source]

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """One process: a commit that begins a branch."""
        steps = b"".join(self._steps(source, target, [turn]))
        self._git("fast-import", "--quiet", given=steps)

    def diff(self, left: str, right: str) -> int:
        """Files that differ; one that differs on both sides is two messages."""
        told = self._git(
            "diff-tree", "-r", "--name-status", f"refs/heads/{left}", f"refs/heads/{right}"
        )
        return sum(2 if line.startswith(b"M") else 1 for line in told.splitlines())

    def collect(self, gone: Sequence[str]) -> None:
        """Delete the branches, then `git gc`."""
        names = b"".join(b"delete refs/heads/%s\n" % name.encode() for name in gone)
        self._git("update-ref", "--stdin", given=names)
        self._git("gc", "--prune=now", "--quiet")

    def pack(self) -> None:
        """`git gc`, not aggressive."""
        self._git("gc", "--prune=now", "--quiet")
