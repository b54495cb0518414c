"""``put`` and ``cat``: bytes and values in and out, streamed, and refused where they must be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import casstore
from casstore.format.digest import Digest
from tests.cli.running import run


def test_init_creates_a_store_once(tmp_path: Path) -> None:
    place = str(tmp_path / "new")
    assert run("init", place, "--lmdb-version", "1", "--json").json["created"] is True
    assert run("init", "--json", store=place).json == {
        "schema": "casstore.init/1",
        "path": place,
        "created": False,
    }
    assert "a store exists already" in run("init", place).out
    assert run("sessions", "--store", place).err == "nothing is stored yet\n"


def test_cat_returns_the_bytes_that_put_stored(own: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    source = tmp_path / "source"
    source.write_bytes(content)
    ran = run("put", str(source), store=own)
    assert ran.out.strip() == Digest.of_blob(content).hex()
    assert run("cat", ran.out.strip(), store=own).raw == content
    target = tmp_path / "target"
    run("cat", ran.out.strip()[:16], "--output", str(target), store=own)
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(content).digest()
    assert (
        "exists already"
        in run("cat", ran.out.strip(), "--output", str(target), store=own, ends=3).err
    )
    run("cat", ran.out.strip(), "--output", str(target), "--force", store=own)


def test_put_reads_standard_input_by_default(own: str) -> None:
    ran = run("put", "--json", store=own, stdin=b"hello")
    assert ran.json["objects"] == [
        {"source": "-", "digest": Digest.of_blob(b"hello").hex(), "kind": "blob", "size_bytes": 5}
    ]
    assert run("put", "-", "-", store=own, stdin=b"hello").out.count("  -") == 2


def test_values_are_json_with_bytes_and_links(own: str) -> None:
    value = {"a": [1, 2.5, None, True], "b": {"$bytes": "AAE="}, "$$c": {"$link": "0" * 64}}
    missing = run("put", "--value", "--json", store=own, stdin=json.dumps(value).encode(), ends=4)
    assert missing.error["error"] == "ObjectNotFoundError"
    del value["$$c"]
    ran = run("put", "--value", "--tag", "mine", store=own, stdin=json.dumps(value).encode())
    assert json.loads(run("cat", "mine", store=own).out) == value
    assert run("cat", "mine", "--path", "a[1]", "--json", store=own).json["value"] == 2.5
    assert run("cat", ran.out.strip(), "--path", "b", store=own).out == '{\n  "$bytes": "AAE="\n}\n'
    assert run("tag", store=own).out.count("mine") == 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "is not JSON"),
        (b'{"a": 1, "a": 2}', "the same key twice"),
        (b"[NaN]", "holds NaN"),
        (b'{"$what": 1}', "is not a known marker"),
        (b'{"$bytes": "*"}', "takes base64"),
        (b"[" * 100 + b"]" * 100, "64"),
        (b"[" * 100_000, "is not JSON"),
        (b"99999999999999999999", ""),
    ],
)
def test_input_that_is_not_a_value_is_refused(own: str, data: bytes, why: str) -> None:
    ran = run("put", "--value", store=own, stdin=data, ends=3)
    assert why in ran.err
    assert "Traceback" not in ran.err


def test_an_existing_tag_is_kept_unless_it_is_moved(own: str) -> None:
    run("put", "--tag", "release", store=own, stdin=b"other", ends=5)
    run("put", "--tag", "release", "--move", store=own, stdin=b"other")
    assert run("cat", "release", store=own).raw == b"other"
    run("put", "--tag", "two", "-", "-", store=own, ends=2)


def test_cat_prints_checkpoints_nodes_and_parts_of_them(example: str, tmp_path: Path) -> None:
    whole = run("cat", "agent@4", "--json", store=example).json
    assert whole["kind"] == "manifest"
    assert whole["value"]["tool_state"]["cwd"] == "/repo"
    assert whole["value"]["leaf"] == "n3"
    part = run("cat", "agent@4", "--path", 'tool_state.files["f2.py"].size', store=example)
    assert part.out == "6\n"
    assert run("cat", "agent@4", "--path", "leaf", store=example).out == '"n3"\n'
    node = run("cat", "agent#n2", "--json", store=example).json
    assert node["value"]["payload"] == {"role": "user", "text": "turn 2"}
    assert run("cat", "agent#n2", "--path", "payload.text", store=example).out == '"turn 2"\n'
    blob = run("cat", "text", "--json", store=example).json
    assert blob["value"] == {"$bytes": "b25lCnR3bwp0aHJlZQo="}
    for kind in ("", "--json"):
        target = tmp_path / f"value{kind}"
        run("cat", "note", "-o", str(target), *filter(None, [kind]), store=example)
        assert json.loads(target.read_text())


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("agent@4", "tool_state.nothing", 4),
        ("agent@4", "leaf.deeper", 4),
        ("agent@4", "tool_state[3]", 3),
        ("agent#n2", "payload.text[0]", 4),
        ("text", "anything", 3),
        ("note", "plan[7]", 4),
        ("note", "plan[", 3),
        ("note", "plan]x", 3),
        ("empty", "x", 3),
    ],
)
def test_a_path_that_does_not_exist_is_an_error(
    example: str, name: str, path: str, code: int
) -> None:
    assert run("cat", name, "--path", path, store=example, ends=code).err.startswith("error: ")


def test_cat_prints_a_text_or_bytes_raw(own: str, tmp_path: Path) -> None:
    long = "line\n" * 200_000
    with casstore.open(own) as store:
        value = {"text": "one\ntwo", "bytes": b"\0\xff", "long": long, "list": [1]}
        store.tag("mixed", store.put_value(value))
    assert run("cat", "mixed", "--path", "text", "--raw", store=own).out == "one\ntwo"
    assert run("cat", "mixed", "--path", "bytes", "-r", store=own).raw == b"\0\xff"
    assert run("cat", "mixed", "--path", "long", "--raw", store=own).out == long
    file = tmp_path / "out"
    run("cat", "mixed", "--path", "text", "--raw", "-o", str(file), store=own)
    assert file.read_text() == "one\ntwo"
    assert "not a text or bytes" in run("cat", "mixed", "--raw", store=own, ends=3).err
    run("cat", "mixed", "--path", "text", "--raw", "--json", store=own, ends=2)
    assert run("cat", "text", "--raw", store=own).out == "one\ntwo\nthree\n"
