"""The API reference shows the examples of docstrings as code."""

from __future__ import annotations

import pytest

griffe = pytest.importorskip("griffe", reason="needs the extra: pip install '.[dev]'")

from doctest_blocks import DoctestBlocks  # noqa: E402


def fenced(text: str) -> str:
    function = griffe.Function("f", docstring=griffe.Docstring(text))
    DoctestBlocks().on_instance(obj=function)
    return str(function.docstring.value)


def test_an_example_is_fenced_with_its_output_and_the_text_around_it_is_not() -> None:
    text = "Add.\n\n>>> add(1, 2)\n3\n>>> add(0, 0)\n0\n\nNever fails.\n\n>>> add()\n0"
    assert fenced(text) == (
        "Add.\n\n```pycon\n>>> add(1, 2)\n3\n>>> add(0, 0)\n0\n```\n\nNever fails.\n\n"
        "```pycon\n>>> add()\n0\n```"
    )


def test_a_docstring_without_an_example_stays_as_it_is() -> None:
    assert fenced("Add.\n\nNever fails.") == "Add.\n\nNever fails."
