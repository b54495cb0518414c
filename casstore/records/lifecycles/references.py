"""``Ref``: names a record, as a source of other records, in reports and in erasure plans."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.records.schema import number_text
from casstore.session.arguments import check_count, check_text

CHECKPOINT: Final = "checkpoint"
USER: Final = "user"
RECORD: Final = "record"
#: An agent's session as a whole, with all its checkpoints.
AGENT: Final = "agent"
#: A user as a whole: all data of the user, and the key that encrypts it.
PERSON: Final = "person"
#: A session of the store itself: records may be derived from it; lifecycles do not store it.
SESSION: Final = "session"
#: Kinds that have a row of their own, and can be annotated.
ROWS: Final = (CHECKPOINT, USER, RECORD)
_KINDS: Final = (*ROWS, AGENT, PERSON, SESSION)


class Ref(NamedTuple):
    """A reference to a record: its kind, its owner and its name within the owner.

    Checkpoint: the session and the number. User data: the hashed user and the name. Record: the
    collection and the name. A whole session or user: its id or hash, and an empty name.

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
        """The text form, as used in plans.

        >>> ref = Ref("record", "facts", "city")
        >>> Ref.from_text(ref.to_text()) == ref
        True
        """
        return json.dumps(list(checked_ref(self)), ensure_ascii=False)

    @staticmethod
    def from_text(text: str) -> Ref:
        """Parse the result of ``to_text``; InvalidInputError if the text is invalid.

        >>> Ref.from_text(Ref("record", "facts", "city").to_text()).name
        'city'
        """
        try:
            return checked_ref(Ref(*json.loads(text)))
        except (ValueError, TypeError, RecursionError) as exc:
            raise InvalidInputError(f"text must be the text of a Ref, got {text!r:.80}") from exc


def not_found(ref: Ref) -> RecordNotFoundError:
    """The error for a record that does not exist."""
    if not ref.name:
        return RecordNotFoundError(ref.kind, ref.owner)
    if ref.kind == USER:
        return RecordNotFoundError("value", ref.name, "of this user")
    return RecordNotFoundError(ref.kind, ref.name, f"of {ref.owner!r}")


def checked_ref(ref: Ref) -> Ref:
    """Return ``ref`` if it is valid, else raise InvalidInputError."""
    if not isinstance(ref, tuple) or len(ref) != 3 or ref[0] not in _KINDS:
        raise InvalidInputError(f"ref must be a Ref of a kind in {_KINDS}, got {ref!r}")
    for text in ref:
        check_text(text, "each part of a Ref")
    return Ref(*ref)


def checkpoint_ref(session: str, number: int) -> Ref:
    """The reference to a checkpoint."""
    check_count(number, "number", least=1)
    return Ref(CHECKPOINT, session, number_text(number))
