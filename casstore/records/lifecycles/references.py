"""How a record is named by others: as the source it was derived from, in reports, in plans."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.session.arguments import check_count, check_text

CHECKPOINT: Final = "checkpoint"
USER: Final = "user"
RECORD: Final = "record"
#: An agent's session as a whole, with all its checkpoints.
AGENT: Final = "agent"
#: All data of a user, and the key.
PERSON: Final = "person"
#: A session of the store itself: something may be derived from it, but it is kept elsewhere.
SESSION: Final = "session"
#: Kinds that have a row of their own, and can be annotated.
ROWS: Final = (CHECKPOINT, USER, RECORD)
_KINDS: Final = (*ROWS, AGENT, PERSON, SESSION)
_DIGITS: Final = 16


class Ref(NamedTuple):
    """The name of a record: its kind, whose or of what it is, and its own name there.

    Of a checkpoint: the session and the number; of user data: the hashed user and the name;
    of a record: the collection and the name; of a session: its id, and nothing.

    >>> life.create_session("s1").checkpoint("begun").ref.owner
    's1'
    >>> life.records.put("facts", "city", "Ulm", Annotation(["process"]))
    Ref(kind='record', owner='facts', name='city')
    """

    kind: str
    owner: str
    name: str = ""

    def __str__(self) -> str:
        if not self.name:
            return f"{self.kind} {self.owner!r}"
        return f"{self.kind} {self.owner!r} {self.name!r}"

    def to_text(self) -> str:
        """One text for it, as in a plan.

        >>> ref = Ref("record", "facts", "city")
        >>> Ref.from_text(ref.to_text()) == ref
        True
        """
        return json.dumps(list(checked_ref(self)), ensure_ascii=False)

    @staticmethod
    def from_text(text: str) -> Ref:
        """What ``to_text`` spelled; InvalidInputError if it is anything else.

        >>> Ref.from_text(Ref("record", "facts", "city").to_text()).name
        'city'
        """
        try:
            return checked_ref(Ref(*json.loads(text)))
        except (ValueError, TypeError, RecursionError) as exc:
            raise InvalidInputError(f"no name of a record: {text!r:.80}") from exc


def not_found(ref: Ref) -> RecordNotFoundError:
    """The error that there is no such record."""
    if not ref.name:
        return RecordNotFoundError(ref.kind, ref.owner)
    if ref.kind == USER:
        return RecordNotFoundError("value", ref.name, "of this user")
    return RecordNotFoundError(ref.kind, ref.name, f"of {ref.owner!r}")


def checked_ref(ref: Ref) -> Ref:
    """The same, if it can name a record."""
    if not isinstance(ref, tuple) or len(ref) != 3 or ref[0] not in _KINDS:
        raise InvalidInputError(f"a record is named by a Ref, of one of {_KINDS}, not by {ref!r}")
    for text in ref:
        check_text(text, "each part of a Ref")
    return Ref(*ref)


def number_text(number: int) -> str:
    """A checkpoint's number as the part of a key: texts in the order of the numbers."""
    return f"{number:0{_DIGITS}}"


def checkpoint_ref(session: str, number: int) -> Ref:
    """The name of a checkpoint."""
    check_count(number, "the number of a checkpoint", least=1)
    return Ref(CHECKPOINT, session, number_text(number))
