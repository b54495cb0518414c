"""For tools/docs: examples in docstrings become code blocks.

Markdown reads a line that begins with ``>>>`` as a quotation. This extension of Griffe, which
mkdocstrings uses to read docstrings, puts a fence around each example.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a line with ``>>>`` to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class DoctestBlocks(griffe.Extension):
    """Fences the examples of every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            fenced = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = fenced
