"""A retention plan as plain data: what is removed, what is kept and why; to and from JSON lines.

The first line has the schema and the time of the plan. Each further line is about one session, or
about a part of a long history. So a plan for any number of sessions is made, saved, read and
executed in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.format.printing import ascii_json
from casstore.maintenance.plan_fields import plain, read_plain
from casstore.maintenance.policy import Policy
from casstore.session import keys

SCHEMA: Final = "casstore.retention/1"


class Kept(NamedTuple):
    """A revision to keep, and all reasons why.

    >>> from casstore.maintenance import retention
    >>> [found] = retention.plan(store, policy=retention.Policy(last=1))
    >>> found.kept[0]
    Kept(revision=2, reasons=('head', 'last'))
    """

    revision: int
    reasons: tuple[str, ...]


class Removed(NamedTuple):
    """A revision to remove, as it was when the plan was made.

    >>> from casstore.maintenance import retention
    >>> [found] = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> [(gone.revision, gone.labels) for gone in found.removed]
    [(1, ('start',))]
    """

    revision: int
    #: In hexadecimal.
    manifest: str
    committed_at_ms: int
    #: Labels that are removed with it.
    labels: tuple[str, ...]
    #: Its marks when the plan was made, in hexadecimal. If they change, the revision is kept.
    mark: str | None = None
    pin_mark: str | None = None


class SessionPlan(NamedTuple):
    """What happens to one session, or to a part of its history.

    >>> from casstore.maintenance import retention
    >>> deadline = session.expire_in(0)
    >>> [found] = retention.plan(store)
    >>> found.session, [reason[:7] for reason in found.deleted]  # and when
    ('s', ['expired'])
    """

    session: str
    #: The policy that decided; None: none is set, and everything stays.
    policy: Policy | None
    #: True: the policy was given with the call. False: it is stored, or no policy is set.
    given: bool
    #: The head when it was planned; revision 0: nothing was committed.
    head_revision: int
    head_manifest: str | None
    #: Why the session is deleted as a whole; empty: it is kept.
    deleted: tuple[str, ...] = ()
    #: Why it is kept although it has expired or is idle.
    spared: tuple[str, ...] = ()
    #: Newest first, all revisions of this part in one of the two.
    kept: tuple[Kept, ...] = ()
    removed: tuple[Removed, ...] = ()
    #: Which row cannot be read: then nothing is decided about the session, or removed of it.
    refused: str | None = None
    #: A long history comes in parts, from 0 on.
    part: int = 0
    mark: str | None = None
    #: True: the policy that decided is the one stored for this session.
    own: bool = False
    #: The policy stored for this session, if the given one decided in its place.
    overridden: Policy | None = None


class Plan:
    """What retention would do. Iterate over it for the sessions, one after the other.

    A plan that ``retention.plan`` returns reads each session when the iteration reaches it.
    ``to_json`` gives lines to save; ``from_json`` makes a plan of them.

    >>> from casstore.maintenance import retention
    >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> [(part.session, [gone.revision for gone in part.removed]) for part in found]
    [('s', [1])]
    """

    def __init__(self, planned_at_ms: int, sessions: Callable[[], Iterable[SessionPlan]]) -> None:
        self.planned_at_ms = planned_at_ms
        self._sessions = sessions

    def __iter__(self) -> Iterator[SessionPlan]:
        return iter(self._sessions())

    def to_json(self) -> Iterator[str]:
        """The plan as lines of JSON, without their line ends.

        >>> from casstore.maintenance import retention
        >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
        >>> len(list(found.to_json()))  # a line for the plan, and one for the session
        2
        """
        yield ascii_json({"schema": SCHEMA, "planned_at_ms": self.planned_at_ms})
        for session in self:
            yield ascii_json(_fields(session))

    @staticmethod
    def from_json(lines: Iterable[str]) -> Plan:
        """The plan from the lines that ``to_json`` wrote, read as it is iterated over.

        InvalidInputError if they are anything else. A plan from an open file can be iterated over
        once.

        >>> from casstore.maintenance import retention
        >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
        >>> saved = retention.Plan.from_json(list(found.to_json()))
        >>> retention.execute(store, saved).revisions_removed
        1
        """
        if not isinstance(lines, Iterable):
            raise InvalidInputError(f"lines must be an iterable of str, got {type(lines).__name__}")
        if iter(lines) is not lines:
            # A list, or the like: each iteration begins at its start.
            return Plan(_header(iter(lines)), lambda: _sessions(_behind_header(lines)))
        running = iter(lines)
        return Plan(_header(running), lambda: _sessions(running))


def _behind_header(lines: Iterable[str]) -> Iterator[str]:
    running = iter(lines)
    next(running)
    return running


def _header(lines: Iterator[str]) -> int:
    found = _loaded(next(lines, ""))
    if found.get("schema") != SCHEMA:
        raise InvalidInputError(f"the first line of a retention plan must have the schema {SCHEMA}")
    planned_at_ms = found.get("planned_at_ms")
    if type(planned_at_ms) is not int:
        raise InvalidInputError("the first line of a retention plan must have planned_at_ms")
    return planned_at_ms


def _loaded(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(f"a line of a retention plan is not JSON: {line!r:.60}") from exc
    if type(found) is not dict:
        raise InvalidInputError(f"a line of a retention plan must be an object, got {line[:60]!r}")
    return found


def _fields(session: SessionPlan) -> dict[str, Any]:
    fields: dict[str, Any] = plain(session)
    for one in fields["removed"]:
        for name in [name for name, value in one.items() if value is None]:
            del one[name]
    return fields


def _sessions(lines: Iterator[str]) -> Iterator[SessionPlan]:
    for line in lines:
        if not isinstance(line, str | bytes) or line.strip():
            yield _session(_loaded(line), line)


def _session(given: dict[str, Any], line: str) -> SessionPlan:
    try:
        found: SessionPlan = read_plain(SessionPlan, given)
        keys.session_key(found.session)
        revisions = [one.revision for one in found.kept] + [one.revision for one in found.removed]
        for revision in revisions:
            if not 0 < revision < 1 << 63:
                raise ValueError(f"there is no revision {revision}")
        for one in found.removed:
            for text in (one.manifest, one.mark, one.pin_mark):
                bytes.fromhex(text or "")
        return found
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"not a line of a retention plan: {line[:60]!r}: {exc}") from exc
