"""Annotations of records: their classes, subjects, sources, holds and seals.

``Annotation`` is what the writer passes, with subjects by name. ``Note`` is what is stored, in a
row of its own: subjects as one-way hashes, including the subjects of the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import InvalidInputError
from casstore.records.lifecycles.references import ROWS, SESSION, Ref, checked_ref
from casstore.session.arguments import check_kind, check_text, list_of

IDENTITY: Final = "identity"
PROCESS: Final = "process"
COMPLIANCE: Final = "compliance"
LEARNED_CONTEXT: Final = "learned_context"
#: The classes of a record; a record may have several.
CLASSES: Final = (IDENTITY, PROCESS, COMPLIANCE, LEARNED_CONTEXT)
# Records of these classes need a subject.
_NEED_SUBJECTS: Final = (IDENTITY, LEARNED_CONTEXT)
#: The most subjects of a record; also the most sources, and the most processors.
MAX_NAMED: Final = 1024
_MAX_TEXT: Final = 4096


class Hold(NamedTuple):
    """An obligation to keep a record until a given time, and the rule that requires it.

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
    """Marks a record as evidence that must not change: for which action, and on what basis.

    >>> consent = life.users.put("anna", "consent", {"given": True})
    >>> life.seal(consent, Seal(action="consent-1", basis="proof of consent"))
    >>> life.remove(consent).stays.action
    'consent-1'
    """

    action: str
    basis: str
    #: Whether summaries may use the record; informational only.
    summarization: str = "forbidden"


class Annotation(NamedTuple):
    """The classes, subjects, sources and processors that a writer declares for a record.

    >>> chat = life.users.put("anna", "chat", "I moved to Ulm")
    >>> about = Annotation(["learned_context"], sources=[chat], processors=["crm"])
    >>> fact = life.records.put("facts", "city", "Ulm", about)
    >>> life.find_note(fact).processors
    ('crm',)
    """

    classes: Sequence[str] = ()
    #: The names of the people that the record is about; only their hashes are stored.
    subjects: Sequence[str] = ()
    #: The records that it was derived from. Their subjects become subjects of this record, too.
    sources: Sequence[Ref] = ()
    #: Third parties that received the record; an erasure reports them so that they can be informed.
    processors: Sequence[str] = ()
    hold: Hold | None = None
    seal: Seal | None = None


class WriteSeal(NamedTuple):
    """A seal as stored: the time of sealing and the hash of the sealed row."""

    sealed_at_ms: int
    action: str
    basis: str
    summarization: str
    hash: str


class Note(NamedTuple):
    """The annotation of a record as it is stored, in a row of its own.

    >>> about = Annotation(["learned_context"], subjects=["anna"], processors=["crm"])
    >>> note = life.find_note(life.records.put("facts", "city", "Ulm", about))
    >>> note.classes, note.processors, note.hold
    (('learned_context',), ('crm',), None)
    """

    classes: tuple[str, ...]
    #: One-way hashes of the subjects.
    subjects: tuple[str, ...] = ()
    sources: tuple[Ref, ...] = ()
    processors: tuple[str, ...] = ()
    #: When the record was written.
    derived_at_ms: int = 0
    hold: Hold | None = None
    seal: WriteSeal | None = None
    #: The reason for each time a seal or hold was lifted.
    reviews: tuple[str, ...] = ()


def checked(annotation: Annotation, *, has_subject: bool, default: str | None) -> Annotation:
    """The annotation with sorted lists without duplicates; InvalidInputError if it is invalid.

    ``has_subject``: the record has a subject already, for example its user. ``default`` is the
    class of an annotation without classes; None: a class is required.
    """
    check_annotation(annotation)
    classes = _texts(annotation.classes, "classes") or ([default] if default else [])
    for each in classes:
        if each not in CLASSES:
            raise InvalidInputError(f"a class must be one of {CLASSES}, got {each!r}")
    if not classes:
        raise InvalidInputError(f"classes is empty; pass at least one of {CLASSES}")
    subjects = _texts(annotation.subjects, "subjects")
    sources = sorted({checked_ref(ref) for ref in list_of(annotation.sources, "sources")})
    for ref in sources:
        # An erasure follows only these kinds of sources, and would miss a record with another.
        if ref.kind not in ROWS and (ref.kind, ref.name) != (SESSION, ""):
            raise InvalidInputError(
                f"a source must be user data, a checkpoint, a record or a whole session, got {ref}"
            )
    processors = _texts(annotation.processors, "processors")
    named: dict[str, Sequence[object]] = {
        "subjects": subjects,
        "sources": sources,
        "processors": processors,
    }
    for name, given in named.items():
        if len(given) > MAX_NAMED:
            raise InvalidInputError(
                f"{name} must have at most {MAX_NAMED} entries, got {len(given)}"
            )
    needing = [each for each in classes if each in _NEED_SUBJECTS]
    if needing and not (has_subject or subjects):
        raise InvalidInputError(f"a record of class {needing[0]!r} needs subjects: pass them")
    if annotation.hold is not None:
        check_hold(annotation.hold)
    if annotation.seal is not None:
        check_seal(annotation.seal)
    return Annotation(
        classes=classes,
        subjects=subjects,
        sources=sources,
        processors=processors,
        hold=annotation.hold,
        seal=annotation.seal,
    )


def check_annotation(annotation: Annotation) -> None:
    """InvalidInputError if ``annotation`` is not an Annotation; ``checked`` checks its fields."""
    check_kind(annotation, "annotation", Annotation)


def check_hold(hold: Hold) -> None:
    """InvalidInputError unless a hold has a basis and an end."""
    check_kind(hold, "hold", Hold)
    check_reason(hold.basis, "the basis of a hold")
    if hold.jurisdiction is not None:
        check_reason(hold.jurisdiction, "a jurisdiction")
    if type(hold.until_ms) is not int or not 0 < hold.until_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"until_ms must be a number of milliseconds since 1970, got {hold.until_ms!r}"
        )


def check_seal(seal: Seal) -> None:
    """InvalidInputError if ``seal`` is not a valid Seal."""
    check_kind(seal, "seal", Seal)
    check_reason(seal.action, "the action of a seal")
    check_reason(seal.basis, "the basis of a seal")
    check_reason(seal.summarization, "summarization of a seal")


def check_reason(text: str, what: str) -> None:
    """InvalidInputError unless ``text`` is a short text that is not blank."""
    check_text(text, what)
    if not text.strip() or len(text) > _MAX_TEXT:
        raise InvalidInputError(f"{what} must have 1 to {_MAX_TEXT} characters, and not be blank")


def _texts(items: Iterable[str], what: str) -> list[str]:
    found = list_of(items, what)
    for each in found:
        check_reason(each, f"each of the {what}")
    return sorted(set(found))
