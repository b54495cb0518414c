"""What is said of a record beside its content: its class, whom it is about, how long it stays.

``Annotation`` is what a writer says, with subjects by their names. ``Note`` is what is kept,
in a row of its own: subjects only as one-way hashes, and whatever the sources were about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.lifecycles.references import ROWS, SESSION, Ref, checked_ref
from casstore.session.arguments import check_text, list_of

IDENTITY: Final = "identity"
PROCESS: Final = "process"
COMPLIANCE: Final = "compliance"
LEARNED_CONTEXT: Final = "learned_context"
#: What a record can be; it may be several of them.
CLASSES: Final = (IDENTITY, PROCESS, COMPLIANCE, LEARNED_CONTEXT)
# These are about somebody, or they are mislabelled.
_NEED_SUBJECTS: Final = (IDENTITY, LEARNED_CONTEXT)
#: How many subjects, sources and processors a record may have, each.
MAX_NAMED: Final = 1024
_MAX_TEXT: Final = 4096


class Hold(NamedTuple):
    """A duty to keep a record until a moment, and by which rule.

    >>> in_ten_years = store.engine.now_ms() + 10 * 365 * 86_400_000
    >>> about = Annotation(["compliance"], hold=Hold("tax law", in_ten_years, "DE"))
    >>> invoice = life.records.put("invoices", "7", {"total": 90}, about)
    >>> life.remove(invoice).stays.basis
    'tax law'
    """

    basis: str
    until_ms: int
    jurisdiction: str | None = None


class Seal(NamedTuple):
    """That a record proves something, and must stay as it is: which action, and why.

    >>> consent = life.users.put("anna", "consent", {"given": True})
    >>> life.seal(consent, Seal(action="consent-1", basis="proof of consent"))
    >>> life.remove(consent).stays.action
    'consent-1'
    """

    action: str
    basis: str
    #: What may be done with it in summaries; a word for readers.
    summarization: str = "forbidden"


class Annotation(NamedTuple):
    """What a writer says of a record.

    >>> chat = life.users.put("anna", "chat", "I moved to Ulm")
    >>> about = Annotation(["learned_context"], sources=[chat], processors=["crm"])
    >>> fact = life.records.put("facts", "city", "Ulm", about)
    >>> life.find_note(fact).processors
    ('crm',)
    """

    classes: Sequence[str] = ()
    #: Whom it is about, by name; only hashes of the names are kept.
    subjects: Sequence[str] = ()
    #: What it was derived from. It is then about whom those are about, too.
    sources: Sequence[Ref] = ()
    #: Who else was given it, and must be told when it is erased.
    processors: Sequence[str] = ()
    hold: Hold | None = None
    seal: Seal | None = None


class WriteSeal(NamedTuple):
    """A seal as it is kept: since when, and the hash of the row that it is about."""

    sealed_at_ms: int
    action: str
    basis: str
    summarization: str
    hash: str


class Note(NamedTuple):
    """What is kept beside a record.

    >>> about = Annotation(["learned_context"], subjects=["anna"], processors=["crm"])
    >>> note = life.find_note(life.records.put("facts", "city", "Ulm", about))
    >>> note.classes, note.processors, note.hold
    (('learned_context',), ('crm',), None)
    """

    classes: tuple[str, ...]
    #: Hashes.
    subjects: tuple[str, ...] = ()
    sources: tuple[Ref, ...] = ()
    processors: tuple[str, ...] = ()
    #: When the record was written.
    derived_at_ms: int = 0
    hold: Hold | None = None
    seal: WriteSeal | None = None
    #: Why a seal or hold was lifted, each time.
    reviews: tuple[str, ...] = ()

    def to_value(self) -> dict[str, Any]:
        """As its row holds it.

        >>> note = Note(("learned_context",), processors=("crm",))
        >>> Note.from_value(note.to_value()) == note
        True
        """
        told: dict[str, Any] = {"c": list(self.classes), "t": self.derived_at_ms}
        if self.subjects:
            told["s"] = list(self.subjects)
        if self.sources:
            told["o"] = [list(ref) for ref in self.sources]
        if self.processors:
            told["p"] = list(self.processors)
        if self.hold is not None:
            told["h"] = list(self.hold)
        if self.seal is not None:
            told["w"] = list(self.seal)
        if self.reviews:
            told["r"] = list(self.reviews)
        return told

    @staticmethod
    def from_value(told: Any) -> Note:
        """What ``to_value`` gave; CorruptionError if it is anything else.

        >>> stored = store.put_value(Note(("learned_context",)).to_value())
        >>> Note.from_value(store.get_value(stored)).classes
        ('learned_context',)
        """
        try:
            return Note(
                tuple(told["c"]),
                tuple(told.get("s", ())),
                tuple([checked_ref(Ref(*ref)) for ref in told.get("o", ())]),
                tuple(told.get("p", ())),
                told["t"],
                Hold(*told["h"]) if "h" in told else None,
                WriteSeal(*told["w"]) if "w" in told else None,
                tuple(told.get("r", ())),
            )
        except (TypeError, KeyError, AttributeError, InvalidInputError) as exc:
            raise CorruptionError(f"the note of a record is damaged: {exc}") from exc


def checked(annotation: Annotation, *, has_subject: bool, default: str | None) -> Annotation:
    """The annotation with its lists in order, each entry once; refused if it cannot be one.

    ``has_subject``: the record is about somebody anyway. ``default`` is its class if it is
    given none; None: it must be given one.
    """
    check_annotation(annotation)
    classes = _texts(annotation.classes, "classes") or ([default] if default else [])
    for each in classes:
        if each not in CLASSES:
            raise InvalidInputError(f"a class is one of {CLASSES}, not {each!r}")
    if not classes:
        raise InvalidInputError(f"a record has at least one class of {CLASSES}")
    subjects = _texts(annotation.subjects, "subjects")
    sources = sorted({checked_ref(ref) for ref in list_of(annotation.sources, "sources")})
    for ref in sources:
        # Others are never looked for: it would be about nobody, and no erasure would find it.
        if ref.kind not in ROWS and (ref.kind, ref.name) != (SESSION, ""):
            raise InvalidInputError(
                f"a source is user data, a checkpoint, a record or a whole session, not {ref}"
            )
    processors = _texts(annotation.processors, "processors")
    if max(len(subjects), len(sources), len(processors)) > MAX_NAMED:
        raise InvalidInputError(f"at most {MAX_NAMED} subjects, sources and processors, each")
    needing = [each for each in classes if each in _NEED_SUBJECTS]
    if needing and not (has_subject or subjects):
        raise InvalidInputError(f"a record of class {needing[0]!r} says whom it is about")
    if annotation.hold is not None:
        check_hold(annotation.hold)
    if annotation.seal is not None:
        check_seal(annotation.seal)
    return Annotation(classes, subjects, sources, processors, annotation.hold, annotation.seal)


def check_annotation(annotation: Annotation) -> None:
    """Refuse what is no annotation; ``checked`` looks at what it says."""
    if not isinstance(annotation, Annotation):
        raise InvalidInputError(f"an annotation is an Annotation, not {type(annotation).__name__}")


def check_hold(hold: Hold) -> None:
    """Refuse what is no hold: it has a reason and an end."""
    if not isinstance(hold, Hold):
        raise InvalidInputError(f"a hold is a Hold, not {type(hold).__name__}")
    check_reason(hold.basis, "the basis of a hold")
    if hold.jurisdiction is not None:
        check_reason(hold.jurisdiction, "a jurisdiction")
    if type(hold.until_ms) is not int or not 0 < hold.until_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"a hold has an end, in milliseconds since 1970, unlike {hold.until_ms!r}"
        )


def check_seal(seal: Seal) -> None:
    """Refuse what is no seal."""
    if not isinstance(seal, Seal):
        raise InvalidInputError(f"a seal is a Seal, not {type(seal).__name__}")
    check_reason(seal.action, "the action of a seal")
    check_reason(seal.basis, "the basis of a seal")
    check_reason(seal.summarization, "what a seal says of summaries")


def check_reason(text: str, what: str) -> None:
    """Refuse what is no short text for a reader."""
    check_text(text, what)
    if not text.strip() or len(text) > _MAX_TEXT:
        raise InvalidInputError(f"{what} is a text of 1 to {_MAX_TEXT} characters")


def _texts(items: Iterable[str], what: str) -> list[str]:
    found = list_of(items, what)
    for each in found:
        check_reason(each, f"each of the {what}")
    return sorted(set(found))
