"""How values, numbers and sizes are printed in one line."""

from __future__ import annotations

from typing import Any, Final

_SIZES: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
#: How many characters of a value are printed.
LONGEST: Final = 72


def shortened(value: Any) -> str:
    """The ``repr`` of a value, cut to ``LONGEST`` characters."""
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def ascii_json(value: Any) -> str:
    """The JSON of a value on one line, without a character that a terminal acts on."""
    # Imported here, because every program loads this module, and few of them print JSON.
    import json

    # JSON does not escape DEL, which can only be inside a string.
    return json.dumps(value).replace("\x7f", "\\u007f")


def count(number: int, one: str, many: str | None = None) -> str:
    """A number of things: ``1 node``, ``12,000 nodes``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(size_bytes: float) -> str:
    """A number of bytes: ``512 B``, ``1.4 MiB``."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    number = float(size_bytes)
    for unit in _SIZES:
        number /= 1024
        if number < 1024 or unit == _SIZES[-1]:
            break
    return f"{number:.1f} {unit}"
