"""Blobs and values in and out: ``put`` and ``cat``."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.output import Printer, dim, is_terminal, name, write_json
from casstore.cli.places import at_path, load, parse_path
from casstore.cli.quantities import size
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import parse_json, plain
from casstore.engine.files import source_error
from casstore.errors import InvalidInputError
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.maintenance.whole_files import whole_file
from casstore.store import Store

_SECTION: Final = "Objects"
_PART_BYTES: Final = 1 << 20
# What a terminal acts on, or shows in another order than it stands in: no part of a plain text.
_UNSHOWN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# What a value given as JSON may have: it is parsed in memory.
_MAX_JSON_BYTES: Final = 1 << 28


class _Counted:
    """A binary file that counts what is read from it."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.size_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        found = self._source.read(size)
        self.size_bytes += len(found)
        return found


@command(
    _SECTION,
    Shape(
        "put",
        {
            "objects": Part(
                "what was stored, in the order given",
                {
                    "source": "the file, - for standard input",
                    "digest": "its name from now on",
                    "kind": "blob or value",
                    "size_bytes": "how long the file was",
                },
            ),
            "tag": "the tag that keeps it, null if none was asked for",
        },
    ),
    "casstore put report.pdf",
    'echo \'{"plan": ["read", "edit"]}\' | casstore put --value --tag plan',
)
@click.argument("files", nargs=-1, metavar="[FILE]…")
@click.option("--value", "-v", is_flag=True, help="The files are JSON; store values, not bytes.")
@click.option("--tag", help="Let this tag keep the object: nothing else does, after the grace.")
@click.option("--move", is_flag=True, help="Take the tag over if it names something else.")
def put(app: App, files: tuple[str, ...], value: bool, tag: str | None, move: bool) -> None:
    """Store files as blobs, or JSON as values; FILE - is standard input, and the default.

    A blob is read in parts, whatever its length, and its digest is what b3sum prints.
    In values, {"$bytes": "<base64>"} stands for bytes and {"$link": "<digest>"} for a link.
    Without a tag, and until something links to it, gc takes an object away after an hour.
    """
    sources = files or ("-",)
    if tag is not None and len(sources) > 1:
        raise click.UsageError("a tag keeps one object; put one file at a time with --tag")
    stored: list[dict[str, Any]] = []
    with app.open(write=True) as store:
        for source in sources:
            stored.append(_put(store, source, as_value=value))
        if tag is not None:
            store.tag(tag, Digest.from_hex(stored[0]["digest"]), move=move)

    def render(to: Printer) -> None:
        for one in stored:
            beside = () if len(stored) == 1 else ("  ", dim(one["source"]))
            to.line(name(one["digest"]), *beside)

    app.answer({"objects": stored, "tag": tag}, render)


def _put(store: Store, source: str, *, as_value: bool) -> dict[str, Any]:
    try:
        if source == "-":
            return _put_open(store, source, sys.stdin.buffer, as_value=as_value)
        with open(source, "rb") as found:
            return _put_open(store, source, found, as_value=as_value)
    except OSError as exc:
        raise source_error("standard input" if source == "-" else source, exc) from exc


def _put_open(store: Store, source: str, found: IO[bytes], *, as_value: bool) -> dict[str, Any]:
    told = "standard input" if source == "-" else source
    if as_value:
        data = found.read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise InvalidInputError(
                f"{told} has more than {size(_MAX_JSON_BYTES)} of JSON; put it as a blob"
            )
        digest = store.put_value(parse_json(data, told))
        kind, length = "value", len(data)
    else:
        counted: Any = _Counted(found)
        digest = store.put_stream(counted)
        kind, length = "blob", counted.size_bytes
    return {"source": source, "digest": digest.hex(), "kind": kind, "size_bytes": length}


@command(
    _SECTION,
    Shape(
        "cat",
        {
            "name": "the name, spelled so that it means nothing else",
            "digest": "of the object; null for a part of one",
            "kind": "blob, value, node or manifest",
            "value": "the content; bytes and links as for put",
        },
    ),
    "casstore cat 3f2a91 > report.pdf",
    "casstore cat agent@12 --path tool_state.cwd",
)
@click.argument("name_", metavar="NAME", shell_complete=complete_name)
@click.option("--path", help="Only what stands there in a value: messages[3].text.")
@click.option("--output", "-o", help="Write to this file, which must not be there.")
@click.option("--force", "-f", is_flag=True, help="Write over a file, or binary to a terminal.")
def cat(app: App, name_: str, path: str | None, output: str | None, force: bool) -> None:
    """Print what NAME stands for: a blob byte by byte, anything else as JSON.

    A blob is written in parts, whatever its length, each verified before it is written.
    Of a session or revision it is the checkpoint, of a node the node with its payload.
    """
    with app.open() as store:
        target = naming.resolve(store, name_)
        if target.digest is None:
            raise InvalidInputError(f"{name_!r}: nothing was committed yet")
        is_blob = naming.kind_of(store, target.digest) in (Kind.BLOB, Kind.ROPE)
        if is_blob and path is None and not app.as_json:
            _write(app, store, target.digest, output, force=force)
            return
        value = at_path(store, target, parse_path(path)) if path else load(store, target)
        document = {
            "name": target.text,
            "digest": None if path else target.digest.hex(),
            "kind": naming.kind_name(store, target.digest),
            "value": plain(value),
        }
        if output is None:
            app.answer(document, lambda to: to.json(document["value"]))
            return
        with _created(output, force=force) as into:
            pieces = io.TextIOWrapper(into, encoding="utf-8", newline="")
            if app.as_json:
                write_json(pieces, document)
            else:
                Printer(pieces).json(document["value"])
            pieces.flush()
            pieces.detach()


@contextmanager
def _created(path: str, *, force: bool) -> Iterator[BinaryIO]:
    try:
        with whole_file(path, replace=force) as into:
            yield into
    except FileExistsError as exc:
        raise InvalidInputError(f"{path} is there already; say --force to write over it") from exc


def _write(app: App, store: Store, digest: Digest, output: str | None, *, force: bool) -> None:
    with store.open_blob(digest) as blob:
        if output is not None:
            with _created(output, force=force) as into:
                _copy(blob, into)
            app.remark(f"wrote {size(os.path.getsize(output))} to {output}")
            return
        sys.stdout.flush()
        if is_terminal(sys.stdout) and not force:
            _show(blob, sys.stdout.buffer)
        else:
            _copy(blob, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _copy(source: IO[bytes], into: IO[bytes]) -> None:
    while part := source.read(_PART_BYTES):
        into.write(part)


def _show(source: IO[bytes], into: IO[bytes]) -> None:
    """Copy text to a terminal; what is none ends it before it gets there."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    part = b"begin"
    while part:
        part = source.read(_PART_BYTES)
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError:
            text = "\0"
        if _UNSHOWN.search(text):
            raise InvalidInputError(
                "this is binary, and a terminal may take it for commands; "
                "use --output FILE, a pipe, or --force"
            )
        into.write(text.encode())
