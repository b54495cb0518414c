"""Golden vectors: no release may change a byte of them while the format version stays (P4)."""

from __future__ import annotations

import json
from typing import Any

import golden
import pytest

from casstore.format import chunking
from casstore.format.canonical import decode, encode
from casstore.format.header import STORE_FORMAT

VECTORS: dict[str, Any] = json.loads(golden.PATH.read_text())


def test_the_golden_vectors_are_of_the_current_format() -> None:
    assert VECTORS["format"] == STORE_FORMAT
    assert VECTORS["chunking"] == chunking.PROFILE


def test_every_vector_that_the_tool_writes_is_committed() -> None:
    assert list(VECTORS["values"]) == list(golden.VALUES)
    assert list(VECTORS["blobs"]) == list(golden.BLOBS)
    for name, description in (golden.VALUES | golden.BLOBS).items():
        committed = (VECTORS["values"] | VECTORS["blobs"])[name]["description"]
        assert repr(committed) == repr(description)


@pytest.mark.parametrize("name", VECTORS["values"])
def test_the_pieces_of_each_golden_value_are_unchanged(name: str) -> None:
    vector = VECTORS["values"][name]
    assert golden.measure_value(vector["description"]) == vector


@pytest.mark.parametrize("name", VECTORS["blobs"])
def test_the_pieces_of_each_golden_blob_are_unchanged(name: str) -> None:
    vector = VECTORS["blobs"][name]
    assert golden.measure_blob(vector["description"]) == vector


def test_the_index_of_every_shape_has_a_vector() -> None:
    assert [vector["nodes"] for vector in VECTORS["indexes"]] == list(golden.INDEXES)


@pytest.mark.parametrize("vector", VECTORS["indexes"], ids=lambda vector: vector["nodes"])
def test_the_pieces_of_each_golden_node_index_are_unchanged(vector: dict[str, Any]) -> None:
    assert golden.measure_index(vector["nodes"]) == vector


@pytest.mark.parametrize(
    "name", [name for name, vector in VECTORS["values"].items() if "encoding" in vector]
)
def test_each_golden_encoding_decodes_to_its_value(name: str) -> None:
    vector = VECTORS["values"][name]
    data = bytes.fromhex(vector["encoding"])
    assert encode(decode(data)) == data
    assert decode(data) == golden.build(vector["description"])
