"""What every way of keeping sessions is asked to do, and how its size is taken.

A peer overrides the verbs it has; ``does`` says whether it has one. What a library has no
call for is not made up around it, so a missing verb is an answer and not a gap.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Turn = Sequence[Message]


class Flush(Enum):
    """What a returned write survives. Only peers of one kind are compared in time."""

    EACH = "flushed to disk"
    LATER = "not flushed"
    NEVER = "memory only"


class Peer:
    """A way to keep sessions. Each measurement gets one of its own and an empty directory."""

    name: str
    flush: Flush
    # Modules, or programs with a leading "!", without which it is skipped.
    needs: tuple[str, ...] = ()

    def start(self, place: Path) -> None:
        """Open or create in ``place``."""
        raise NotImplementedError

    def stop(self) -> None:
        """Close what ``start`` opened."""
        raise NotImplementedError

    def reopen(self, place: Path) -> None:
        """Forget what is in memory, as a new process would."""
        self.stop()
        self.start(place)

    def settle(self, place: Path) -> None:
        """Bring logs home, so that a size is that of the data."""

    def size_bytes(self, place: Path) -> int:
        """What the files take on the disk, in whole blocks."""
        self.settle(place)
        return sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())

    def commit(self, session: str, turn: Turn) -> None:
        """Add a turn; whatever ``flush`` promises holds when this returns."""
        raise NotImplementedError

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """Add many new sessions in the fewest calls there are for it."""
        raise NotImplementedError

    def path(self, session: str) -> Sequence[Any]:
        """All messages of a session, decoded."""
        raise NotImplementedError

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """Keep ``state``, of which only ``key`` is new; earlier states stay readable."""
        raise NotImplementedError

    def fork(self, source: str, target: str) -> None:
        """Make a session that stands where another does and goes its own way."""
        raise NotImplementedError

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """Fork and add a turn."""
        raise NotImplementedError

    def diff(self, left: str, right: str) -> int:
        """How many messages are in one of two sessions only."""
        raise NotImplementedError

    def collect(self, gone: Sequence[str]) -> None:
        """Delete sessions and make their room usable again, keeping what others share."""
        raise NotImplementedError

    def pack(self) -> None:
        """Make what is kept smaller."""
        raise NotImplementedError


def does(peer: type[Peer], verb: str) -> bool:
    """Has this peer the verb?"""
    return getattr(peer, verb) is not getattr(Peer, verb)


def missing(peer: type[Peer]) -> str | None:
    """What the peer needs and is not installed."""
    for name in peer.needs:
        if name.startswith("!"):
            if shutil.which(name[1:]) is None:
                return name[1:]
            continue
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    return None
