"""The branches of a conversation: names for leaves of one graph.

They are stored in ``turn_state`` of the session's checkpoint, so that one commit appends items and
moves the branch:

    openai-agents   1
    clears          the number of times the conversation was cleared
    branches        name: [leaf or nil, created, items, turns]
    used            further names that are reserved: those of deleted branches

A session without this state, for example an imported one, is the branch ``main``.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.errors import BranchNotFoundError, CorruptionError, InvalidInputError

MAIN: Final = "main"
_MARK: Final = "openai-agents"
_VERSION: Final = 1


class Branch(NamedTuple):
    """A branch of a conversation. ``turns`` counts the user's messages, ``items`` all items.

    >>> import asyncio
    >>> async def main():
    ...     session = CasstoreSession(store, "a conversation")
    ...     await session.add_items([{"role": "user", "content": "hello"}])
    ...     return [(branch.name, branch.turns) for branch in await session.branches()]
    >>> asyncio.run(main())
    [('main', 1)]
    """

    name: str
    #: The last node of the branch; None: it is empty.
    leaf: str | None
    created_at_ms: int
    items: int
    turns: int


class Branches(NamedTuple):
    """The branches of a conversation at one moment."""

    clears: int
    by_name: dict[str, Branch]
    used: frozenset[str]

    def get(self, name: str) -> Branch:
        """A branch; BranchNotFoundError if the name does not exist."""
        found = self.by_name.get(name)
        if found is None:
            raise BranchNotFoundError(name)
        return found

    def put(self, branch: Branch) -> Branches:
        """A copy with this branch replaced or added."""
        return self._replace(by_name={**self.by_name, branch.name: branch})

    def drop(self, name: str) -> Branches:
        """A copy without this branch; its name stays reserved."""
        left = {key: each for key, each in self.by_name.items() if key != name}
        return self._replace(by_name=left)

    def cleared(self, now_ms: int) -> Branches:
        """A copy with only an empty main branch; names stay reserved."""
        return Branches(self.clears + 1, {MAIN: Branch(MAIN, None, now_ms, 0, 0)}, self.used)


def none_yet() -> Branches:
    """The branches of a new conversation."""
    return Branches(0, {MAIN: Branch(MAIN, None, 0, 0, 0)}, frozenset((MAIN,)))


def pack(branches: Branches) -> dict[str, Any]:
    """The stored form."""
    return {
        _MARK: _VERSION,
        "clears": branches.clears,
        "branches": {each.name: list(each[1:]) for each in branches.by_name.values()},
        "used": sorted(branches.used - branches.by_name.keys()),
    }


def unpack(session: str, stored: Any) -> Branches | None:
    """Decode the result of ``pack``; None if nothing is stored."""
    if stored is None:
        return None
    if type(stored) is not dict or _MARK not in stored:
        raise InvalidInputError(
            f"session {session!r} has a turn_state of another program, so it cannot be used as a "
            "conversation; fork it, replace the fork's checkpoint, and use the fork"
        )
    if stored[_MARK] != _VERSION:
        raise InvalidInputError(
            f"session {session!r} was written by a newer version of casstore: upgrade casstore"
        )
    try:
        by_name = {name: Branch(name, *values) for name, values in stored["branches"].items()}
        return Branches(stored["clears"], by_name, frozenset((*stored["used"], *by_name)))
    except (KeyError, TypeError, AttributeError) as exc:
        raise CorruptionError(f"the branches of session {session!r} are damaged") from exc
