"""Renders pages: the templates, and the filters for sizes, times and addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from casstore.cli.quantities import clock, count, duration, moment, size
from casstore.format.digest import plain_hash
from casstore.ui.texts import one_line, short, shown
from casstore.ui.views.values import path_text
from casstore.version import __version__

FOLDER: Final = Path(__file__).parent
STATIC: Final = FOLDER / "static"
_HIDDEN: Final = "█████"
_DAY_MS: Final = 86_400_000
_ROLES: Final = frozenset(("user", "assistant", "tool", "system", "checkpoint"))
_KINDS: Final = frozenset(("session", "claude", "lg", "lgm"))

Redact = Callable[[str], str]


def redactor(patterns: Sequence[re.Pattern[str]]) -> Redact:
    """A function that replaces what patterns find in a text."""

    def redact(text: str) -> str:
        for pattern in patterns:
            text = pattern.sub(_HIDDEN, text)
        return text

    return redact


def redacted(value: Any, redact: Redact) -> Any:
    """A value with every text in it redacted, keys and fields of tuples included."""
    if isinstance(value, str):
        return _redacted_text(value, redact)
    if isinstance(value, dict):
        return {redacted(key, redact): redacted(item, redact) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[redacted(item, redact) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([redacted(item, redact) for item in value])
    return value


def _redacted_text(text: str, redact: Redact) -> str:
    """Redact a text. In JSON, redact each value decoded, because escapes hide matches."""
    found = redact(text)
    if text[:1] in ("{", "["):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return found
        clean = redacted(inner, redact)
        if clean != inner:
            return redact(json.dumps(clean, ensure_ascii=False))
    return found


def environment(redact: Redact | None = None) -> Environment:
    """The templates. Every text that is put into one is escaped, and redacted by ``redact``."""

    def finalize(value: Any) -> Any:
        if isinstance(value, Markup) or not isinstance(value, str):
            return "" if value is None else value
        return shown(value if redact is None else redact(value))

    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        size=size, clock=_clock, moment=_moment, duration=duration, number=_number, short=_short,
        line=one_line, anchor=_anchor, role=_role, path=path_text,
    )  # fmt: skip
    made.globals.update(href=href, age=_ago, count=count, version=__version__)
    return made


def href(page: str, /, **parameters: Any) -> str:
    """The URL of a page with parameters; those that are None or empty are left out."""
    given = {name: value for name, value in parameters.items() if value is not None and value != ""}
    # No id has a lone surrogate, but the URL that a user typed may have one: replace it.
    return f"{page}?{urlencode(given, errors='replace')}" if given else page


def _ago(then_ms: int, now_ms: int) -> str:
    """How long ago something was; from 30 days on, its date."""
    past_ms = max(0, now_ms - then_ms)
    for unit_ms, unit in ((_DAY_MS, "d"), (3_600_000, "h"), (60_000, "min")):
        if past_ms >= unit_ms:
            if past_ms >= 30 * _DAY_MS:
                return clock(then_ms)[:10]
            return f"{past_ms // unit_ms} {unit} ago"
    return "just now"


def _clock(time_ms: int | None) -> str:
    return "–" if time_ms is None else clock(time_ms)


def _moment(time_ms: int | None) -> str:
    return "" if time_ms is None else moment(time_ms)


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def _short(digest: str) -> str:
    return short(bytes.fromhex(digest))


def _anchor(text: str, kind: str) -> str:
    """The HTML id of an element for an arbitrary text."""
    return f"{kind}-{plain_hash(text.encode('utf-8', 'replace'), 8).hex()}" if text else ""


def _role(text: str) -> str:
    """The CSS class for a role; ``other`` for a role without one, as roles may be any text."""
    return text if text in _ROLES | _KINDS else "other"
