"""``put`` stores files as blobs or values; ``cat`` prints the content of a name."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from shutil import copyfileobj
from typing import IO, Any, BinaryIO, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.fields import nested
from casstore.cli.naming import complete_name
from casstore.cli.output import Printer, dim, is_terminal, name, write_json
from casstore.cli.places import at_path, load, parse_path
from casstore.cli.quantities import size
from casstore.cli.text import parse_json, plain
from casstore.engine.files import source_error
from casstore.errors import InvalidInputError
from casstore.format.digest import Digest
from casstore.maintenance.files import whole_file
from casstore.objects import stored
from casstore.objects.stored import Stored
from casstore.store import Store

_PART_BYTES: Final = 1 << 20
# Characters that make an output binary: control characters, which a terminal obeys, and
# bidirectional controls, which change the order in which it shows text.
_UNSHOWN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# The limit of a JSON input, which is parsed in memory.
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
    {
        "objects": nested(
            "the stored objects, in the order given",
            {
                "source": "the file, - for standard input",
                "digest": "its digest, which names it",
                "kind": "blob or value",
                "size_bytes": "the size of the file",
            },
        ),
        "tag": "the tag that keeps it, null if none was given",
    },
    "casstore put report.pdf",
    'echo \'{"plan": ["read", "edit"]}\' | casstore put --value --tag plan',
)
@click.argument("files", nargs=-1, metavar="[FILE]…")
@click.option("--value", "-v", is_flag=True, help="The files are JSON: store values, not blobs.")
@click.option("--tag", help="Keep the object under this tag.")
@click.option("--move", is_flag=True, help="Move the tag if it keeps another object.")
def put(app: App, files: tuple[str, ...], value: bool, tag: str | None, move: bool) -> None:
    """Store files as blobs, or JSON as values.

    FILE - is standard input, and the default. A blob is read in parts, whatever its length, and
    its digest is the one that b3sum prints. In values, {"$bytes": "<base64>"} stands for bytes
    and {"$link": "<digest>"} for a link. gc removes an object after an hour unless a tag, a pin
    or another object refers to it.
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
            note = () if len(stored) == 1 else ("  ", dim(one["source"]))
            to.line(name(one["digest"]), *note)

    app.answer({"objects": stored, "tag": tag}, render)


def _put(store: Store, source: str, *, as_value: bool) -> dict[str, Any]:
    title = "standard input" if source == "-" else source
    try:
        with nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file:
            if as_value:
                data = file.read(_MAX_JSON_BYTES + 1)
                if len(data) > _MAX_JSON_BYTES:
                    raise InvalidInputError(
                        f"{title} has more than {size(_MAX_JSON_BYTES)} of JSON; put it as a blob"
                    )
                digest = store.put_value(parse_json(data, title))
                kind, length = "value", len(data)
            else:
                counted: Any = _Counted(file)
                digest = store.put_stream(counted)
                kind, length = "blob", counted.size_bytes
    except OSError as exc:
        raise source_error(title, exc) from exc
    return {"source": source, "digest": digest.hex(), "kind": kind, "size_bytes": length}


@command(
    {
        "name": "the unambiguous name",
        "digest": "the digest of the object; null with --path",
        "kind": "blob, value, node, manifest or record",
        "value": "the content; bytes and links as for put",
    },
    "casstore cat 3f2a91 > report.pdf",
    "casstore cat agent@12 --path tool_state.cwd --raw",
)
@click.argument("name_", metavar="NAME", shell_complete=complete_name)
@click.option("--path", help="Only the value at this path: messages[3].text.")
@click.option("--raw", "-r", is_flag=True, help="Print a text or bytes value itself, not JSON.")
@click.option("--output", "-o", help="Write to this file, which must not exist.")
@click.option(
    "--force", "-f", is_flag=True, help="Overwrite a file, or write binary data to a terminal."
)
def cat(app: App, name_: str, path: str | None, raw: bool, output: str | None, force: bool) -> None:
    """Print the content of NAME, a blob as its bytes.

    Anything else is printed as JSON. A blob is written in parts, whatever its length, each
    verified before it is written. For a session or revision the checkpoint is printed, for a
    node the node with its payload.
    """
    with app.open() as store:
        target = naming.resolve(store, name_)
        kind = "record"
        if target.entry is None:
            kind = naming.kind_name(store, target.require_digest())
        if kind == "blob" and path is None and not app.as_json:
            assert target.digest is not None
            _write(app, store.open_blob(target.digest), output, force=force)
            return
        value = at_path(store, target, parse_path(path)) if path else load(store, target)
        if raw:
            if app.as_json:
                raise click.UsageError("either --raw or --json")
            _write(app, io.BytesIO(_raw(value, name_)), output, force=force)
            return
        document = {
            "name": target.text,
            "digest": None if path else target.digest,
            "kind": kind,
            "value": plain(value),
        }
        if output is None:
            app.answer(document, lambda to: to.json(document["value"]))
            return
        with _created(output, force=force) as into:
            pieces = io.TextIOWrapper(into, encoding="utf-8", newline="")
            if app.as_json:
                write_json(pieces, app.shape.document(document))
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
        raise InvalidInputError(f"{path} exists already; --force overwrites it") from exc


def _raw(value: Any, text: str) -> bytes:
    """The bytes of a text or bytes value; InvalidInputError for other values."""
    if isinstance(value, Stored):
        events = value.events()
        kind, value = next(events)
        if kind in (stored.TEXT, stored.BYTES):
            parts = [event.value for event in events if event.kind != stored.END]
            value = ("" if kind == stored.TEXT else b"").join(parts)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    raise InvalidInputError(
        f"{text!r} is not a text or bytes; name one inside it with --path, or leave out --raw"
    )


def _write(app: App, blob: IO[bytes], output: str | None, *, force: bool) -> None:
    with blob:
        if output is not None:
            with _created(output, force=force) as into:
                copyfileobj(blob, into, _PART_BYTES)
            app.remark(f"wrote {size(os.path.getsize(output))} to {output}")
            return
        sys.stdout.flush()
        if is_terminal(sys.stdout) and not force:
            _show(blob, sys.stdout.buffer)
        else:
            copyfileobj(blob, sys.stdout.buffer, _PART_BYTES)
        sys.stdout.buffer.flush()


def _show(source: IO[bytes], into: IO[bytes]) -> None:
    """Copy text to a terminal; InvalidInputError before a part that is not text is written."""
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
                "this is binary data, which a terminal may take for commands; "
                "use --output FILE, a pipe, or --force"
            )
        into.write(text.encode())
