"""JSON in ASCII: plans are shown on terminals, which take some characters for commands."""

from __future__ import annotations

import json
from typing import Any


def ascii_json(value: Any) -> str:
    """The JSON of a value on one line, without a character that a terminal acts on."""
    # JSON takes DEL for a letter, and it can stand in strings alone.
    return json.dumps(value).replace("\x7f", "\\u007f")
