"""What a row holds of a value: the value itself if it is short, else a link to it.

So that rows can be listed, counted and removed without reading what they hold.
"""

from __future__ import annotations

from typing import Any, Final

from casstore.errors import CorruptionError, ObjectNotFoundError
from casstore.format.canonical import Link
from casstore.format.limits import OUTLINE_MIN_BYTES
from casstore.session.records import Draft
from casstore.store import Store

_HERE: Final = "v"
_ELSEWHERE: Final = "V"


def content(draft: Draft, value: Any) -> dict[str, Any]:
    """The fields that hold a value; its objects go into the draft."""
    if type(value) in (str, bytes):
        kept = value if len(value) < OUTLINE_MIN_BYTES // 4 else draft.keep(value)
    else:
        kept = draft.keep_apart(value)
    if type(kept) is Link and type(value) is not Link:
        return {_ELSEWHERE: kept}
    return {_HERE: value}


def read_content(store: Store, fields: dict[str, Any]) -> Any:
    """The value that fields hold."""
    if _HERE in fields:
        return fields[_HERE]
    link = fields.get(_ELSEWHERE)
    if type(link) is not Link:
        raise CorruptionError("the content of a record is damaged")
    try:
        return store.get_value(link.digest)
    except ObjectNotFoundError as exc:
        raise CorruptionError(f"the content of a record is not in the store: {exc}") from exc
