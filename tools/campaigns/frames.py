"""Puts slabs, dictionaries and index rows into stores that casstore did not write.

Each hostile row is put into a closed, otherwise valid store. Then the object is read and the store
is verified. Verifying must raise a typed error; reading must too, unless the object is right
nevertheless. Both must take little memory: a size that a row claims must be checked before it is
used (P7).
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import lmdb
import zstandard

import casstore
from campaigns import specimen
from campaigns.replay import Verifier, Violation, serve
from campaigns.tally import Progress, Report, Tally, silent
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import store_dictionary
from casstore.engine.lmdb.lookup import PREFIX_BYTES, index_key
from casstore.engine.protocol import NewObject
from casstore.errors import CasstoreError
from casstore.format.digest import Kind, digest_of, plain_hash

MAX_GROWTH_BYTES = 64 << 20

_HUGE_BYTES = 512 << 20
_CONTENT = b"a hundred bytes of content that compresses well " * 2 + b"1234"
_DIGEST = plain_hash(_CONTENT)
# The hostile slab holds this one object, with the first id of an empty store.
_ID = 1
_WIDTHS_AT, _COUNT_AT, _DICTIONARY_AT = 2, 4, 8


class Case(NamedTuple):
    """Rows to put, by database; and whether ``verify`` must refuse the store because of them."""

    name: str
    rows: Sequence[tuple[bytes, bytes, bytes]]
    verify_fails: bool = True


# --- making slabs -------------------------------------------------------------------


def _zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(raw)


def _slab(
    payload: bytes,
    *,
    codec: int = slabs.CODEC_ZSTD,
    length: int = len(_CONTENT),
    dictionary: int = 0,
    kind: int = Kind.BLOB,
    children: Sequence[int] = (),
    digest: bytes = _DIGEST,
    first_id: int = _ID,
) -> bytes:
    """A slab of one object with a well-formed directory of any content."""
    columns = slabs.Columns()
    columns.add_new(first_id, [NewObject(digest, kind, b"", ())], [children])
    columns._lengths = [length]
    return columns.encode(first_id, 0, lambda _: (codec, dictionary, payload))[1]


def _resealed(value: bytes, at: int, patch: bytes, *, key: bytes = slabs.slab_key(_ID)) -> bytes:
    """The slab with some bytes changed and a recomputed checksum."""
    changed = bytearray(value)
    changed[at : at + len(patch)] = patch
    directory_end = slabs.read_directory(slabs.slab_key(_ID), value).payload_at
    header_end = slabs.HEADER_BYTES - 8
    checked = key + changed[:header_end] + changed[slabs.HEADER_BYTES : directory_end]
    changed[header_end : slabs.HEADER_BYTES] = plain_hash(bytes(checked), 8)
    return bytes(changed)


def _alone(
    name: str, value: bytes, *, index: bytes | None = None, key: bytes | None = None
) -> Case:
    """The slab, and an index row for its object; ``index`` replaces the id in that row."""
    row = index_key(_DIGEST, _ID) if index is None else _DIGEST[:PREFIX_BYTES] + index
    slab_row = slabs.slab_key(_ID) if key is None else key
    return Case(name, [(b"slabs", slab_row, value), (b"index", row, b"")])


@functools.cache
def _zeros_frame(size_bytes: int, *, declared: bool = True) -> bytes:
    """A few bytes that inflate to ``size_bytes`` zeros: run-length blocks, not compressed."""
    # Magic, a single-segment descriptor with eight bytes of content size; or a window
    # descriptor and no size.
    head = b"\x28\xb5\x2f\xfd" + (
        b"\xe0" + size_bytes.to_bytes(8, "little") if declared else b"\x00\x88"
    )
    block_bytes = 128 << 10
    blocks = []
    for start in range(0, size_bytes, block_bytes):
        size = min(block_bytes, size_bytes - start)
        last = start + size == size_bytes
        blocks.append((last | 1 << 1 | size << 3).to_bytes(3, "little") + b"\0")
    return head + b"".join(blocks)


def _packed(columns: bytes, payload: bytes) -> bytes:
    """A slab of layout 2: ``columns`` follow the digest, and the checksum is right."""
    header = bytearray(_slab(payload)[: slabs.HEADER_BYTES - 8])
    header[0] = slabs.PACKED_LAYOUT
    directory = _DIGEST + columns
    checksum = plain_hash(slabs.slab_key(_ID) + bytes(header) + directory, 8)
    return bytes(header) + checksum + directory + payload


def _framed(frame: bytes, length: int | None = None) -> bytes:
    return (len(frame) if length is None else length).to_bytes(4, "little") + frame


def cases(truncations: int, rng: random.Random) -> Iterator[Case]:
    """Every kind of hostile row, and a good slab cut at up to ``truncations`` of its bytes."""
    good = _slab(_zstd(_CONTENT))
    raw = _slab(_CONTENT, codec=slabs.CODEC_RAW)
    length_at = slabs.HEADER_BYTES + 32 + 1
    size = len(_CONTENT)
    yield _alone("a frame that declares 512 MiB for 100 bytes", _slab(_zeros_frame(_HUGE_BYTES)))
    yield _alone(
        "a frame and a directory that agree on 512 MiB",
        _slab(_zeros_frame(_HUGE_BYTES), length=_HUGE_BYTES),
    )
    yield _alone(
        "a directory that claims 2^60 bytes, as does its frame",
        _slab(b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little"), length=1 << 60),
    )
    yield _alone(
        "a frame without a size that inflates to 512 MiB",
        _slab(_zeros_frame(_HUGE_BYTES, declared=False)),
    )
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(_CONTENT)
    yield _alone("a frame without a size", _slab(unsized))
    yield _alone("a frame shorter than its directory says", _slab(_zstd(_CONTENT[:-1])))
    yield _alone("a frame longer than its directory says", _slab(_zstd(_CONTENT + b"x")))
    yield _alone("raw bytes fewer than the directory says", _slab(_CONTENT[:-1], codec=0))
    yield _alone("raw bytes more than the directory says", _slab(_CONTENT + b"x", codec=0))
    yield _alone("an empty payload", _slab(b""))
    yield _alone("a payload that is not a frame", _slab(b"\xff" * 60))
    yield _alone("two frames", _slab(_zstd(_CONTENT) * 2, length=2 * size))
    yield _alone("other content than the digest names", _slab(_zstd(b"x" * size)))

    for number in (0, 2, 1 << 16, (1 << 32) - 1):
        patch = number.to_bytes(4, "little")
        yield _alone(f"a directory of {number} objects", _resealed(good, _COUNT_AT, patch))
    for widths in (0x04, 0x40, 0xFF, 0x33):
        for offset in (0, 1):
            yield _alone(
                f"widths {widths:#04x} at {offset}",
                _resealed(good, _WIDTHS_AT + offset, bytes([widths])),
                # Columns that are all empty may have any width.
            )._replace(verify_fails=not (offset == 1 and widths == 0x33))
    for length in (0, 1, 99, 101, 255):
        yield _alone(f"a sealed length of {length}", _resealed(good, length_at, bytes([length])))
        yield _alone(
            f"a sealed length of {length}, raw", _resealed(raw, length_at, bytes([length]))
        )
    yield _alone("an absurd sealed length", _slab(_CONTENT, codec=0, length=(1 << 64) - 1))
    yield _alone("255 children without space for any", _resealed(good, length_at + 1, b"\xff"))

    for child, what in ((-5, "before the first id"), (-(1 << 40), "far before"), (0, "id 0")):
        value = _slab(_zstd(b"\0" + _CONTENT), kind=Kind.VALUE, children=[child])
        yield _alone(f"a child {what}", value)
    yield _alone(
        "a child that is the object itself",
        _slab(_zstd(b"\0" + _CONTENT), kind=Kind.VALUE, children=[_ID]),
    )
    yield _alone("an unknown codec", _resealed(good, 1, b"\x09"))
    yield _alone("an unknown layout", _resealed(good, 0, b"\x63"))
    yield _alone("an unknown dictionary", _slab(_zstd(_CONTENT), dictionary=77))
    yield _alone("the highest dictionary", _resealed(good, _DICTIONARY_AT, b"\xff\xff\xff\xff"))
    yield _alone("an unknown kind", _slab(_zstd(_CONTENT), kind=99))
    yield _alone("a dead object that the index names", _slab(_zstd(_CONTENT), kind=slabs.DEAD))
    yield _alone(
        "a value whose bytes are not canonical",
        _slab(_zstd(_CONTENT), kind=Kind.VALUE, digest=digest_of(Kind.VALUE, _CONTENT)),
    )._replace(verify_fails=False)
    yield _alone(
        "a rope without a body",
        _slab(_zstd(_CONTENT), kind=Kind.ROPE),
    )

    yield from _packed_cases(good, truncations, rng)
    yield from _dictionary_cases()
    yield from _index_cases(good)
    yield from _key_cases(good)
    for name, whole in (("zstd", good), ("raw", raw)):
        cuts = range(len(whole))
        drawn = cuts if truncations >= len(whole) else sorted(rng.sample(cuts, truncations))
        for cut in drawn:
            yield _alone(f"a {name} slab cut to {cut} bytes", whole[:cut])


def _packed_cases(good: bytes, truncations: int, rng: random.Random) -> Iterator[Case]:
    """Slabs of layout 2, whose columns are a frame that may claim anything too."""
    payload_at = slabs.read_directory(slabs.slab_key(_ID), good).payload_at
    columns = good[slabs.HEADER_BYTES + len(_DIGEST) : payload_at]
    payload = good[payload_at:]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(columns)
    sound = _packed(_framed(_zstd(columns)), payload)
    yield _alone("a sound slab of layout 2", sound)._replace(verify_fails=False)
    hostile = {
        "that declare 512 MiB": _framed(_zeros_frame(_HUGE_BYTES)),
        "that inflate to 512 MiB and declare nothing": _framed(
            _zeros_frame(_HUGE_BYTES, declared=False)
        ),
        "that declare 2^60 bytes": _framed(
            b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little")
        ),
        "that declare nothing": _framed(unsized),
        "one byte short": _framed(_zstd(columns[:-1])),
        "one byte long": _framed(_zstd(columns + b"\0")),
        "of no bytes": _framed(_zstd(b"")),
        "in no frame": _framed(b"\xff" * 20),
        "in a frame of length 0": _framed(b""),
        "in a frame that ends behind the slab": _framed(_zstd(columns), (1 << 32) - 1),
        "in a frame that is cut": _framed(_zstd(columns)[:-1]),
        "as layout 1 has them": columns,
        "of a dead object": _framed(_zstd(bytes([slabs.DEAD]) + columns[1:])),
        "of another length": _framed(_zstd(columns[:1] + b"\x01" + columns[2:])),
    }
    # The first frame is right, and the bytes after it are ignored.
    doubled = _packed(_framed(_zstd(columns) * 2), payload)
    yield _alone("packed columns in two frames", doubled)._replace(verify_fails=False)
    for how, changed in hostile.items():
        yield _alone(f"packed columns {how}", _packed(changed, payload))
    # After its magic number a frame has a byte in which zstd does not use this bit.
    unused_at = len(sound) - len(payload) + 4
    for at in sorted(rng.sample(range(len(sound)), min(truncations, len(sound)))):
        flipped = bytearray(sound)
        flipped[at] ^= 0x10
        case = _alone(f"a slab of layout 2 with byte {at} flipped", bytes(flipped))
        yield case._replace(verify_fails=at != unused_at)
    for cut in sorted(rng.sample(range(len(sound)), min(truncations, len(sound)))):
        yield _alone(f"a slab of layout 2 cut to {cut} bytes", sound[:cut])


def _dictionary_cases() -> Iterator[Case]:
    content = b"a hundred bytes of content that compresses well"
    frame = zstandard.ZstdCompressor(
        dict_data=zstandard.ZstdCompressionDict(content), write_dict_id=False
    ).compress(_CONTENT)
    case = _alone("", _slab(frame, dictionary=1))
    sound = store_dictionary(content)
    key = (1).to_bytes(4, "big")
    damaged = {
        "cut": sound[:-1],
        "shorter than its checksum": sound[:5],
        "empty": b"",
        "with a flipped bit": sound[:-1] + bytes([sound[-1] ^ 1]),
        "of other content": store_dictionary(b"other"),
        "under another's checksum": sound[:8] + store_dictionary(b"other")[8:],
        "that is not compressed": plain_hash(content, 8) + content,
        "that claims too much": sound[:8] + _zeros_frame(2 << 20),
        "that claims nothing": sound[:8] + _zeros_frame(1 << 16, declared=False),
    }
    for how, row in damaged.items():
        yield case._replace(
            name=f"a dictionary {how}", rows=[*case.rows, (b"dictionaries", key, row)]
        )
    good = _alone("", _slab(_zstd(_CONTENT)))
    for number in (b"", b"x", b"-1", b"99999999999999999999", b"\xff", b"9" * 5000):
        # The store is valid except for the number of its newest dictionary; it may open or refuse.
        yield good._replace(
            name=f"a current dictionary of {number[:24]!r}",
            rows=[*good.rows, (b"meta", b"current_dictionary", number)],
            verify_fails=False,
        )


def _index_cases(good: bytes) -> Iterator[Case]:
    for name, row in {
        "points at an id that is not there": b"\x07",
        "points at id 0": b"\x00",
        "points at the last id of all": slabs.slab_key(slabs.MAX_ID),
        "points nowhere": b"",
        "is long": b"\x01" * 9,
        "is very long": b"\xff" * 400,
    }.items():
        yield _alone(f"an index row that {name}", good, index=row)
    # The right number, but too long: casstore does not write such a row.
    yield _alone("an index row of eight bytes that are the id", good, index=slabs.slab_key(_ID))


def _key_cases(good: bytes) -> Iterator[Case]:
    for name, key in {
        "of one byte": b"\x01",
        "of nine bytes": slabs.slab_key(_ID) + b"\0",
        "of another id": slabs.slab_key(2),
        "of the last id of all": slabs.slab_key(slabs.MAX_ID),
    }.items():
        yield _alone(f"a slab under a key {name}", good, key=key)
    resealed = _resealed(good, _COUNT_AT, (5).to_bytes(4, "little"))
    yield _alone("a slab of more objects than there are ids", resealed)


# --- trying them ----------------------------------------------------------------------


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    engines: Sequence[int] = specimen.ENGINES,
    progress: Progress = silent,
) -> Report:
    """Try every case, and a valid slab truncated at up to ``count`` places, on each engine."""
    drawn = list(cases(count, random.Random(seed)))
    tally = Tally("frames", total=len(drawn) * len(engines), progress=progress)
    argv = [sys.executable, str(Path(__file__).resolve())]
    with Verifier(argv, scratch / "worker.stderr", timeout_s=30) as worker:
        for engine in engines:
            empty = scratch / f"empty-{engine}"
            casstore.open(empty, lmdb_version=engine).close()
            for case in drawn:
                place = scratch / "store"
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(empty, place)
                _plant(place, case)
                _judge(tally, engine, case, worker.ask(place, _words(case)))
                tally.tried()
    return tally.report()


def _words(case: Case) -> list[str]:
    return [_DIGEST.hex(), str(int(case.verify_fails))]


def _plant(place: Path, case: Case) -> None:
    with lmdb.open(str(place), map_size=1 << 30, max_dbs=32) as env:
        for database, key, value in case.rows:
            handle = env.open_db(database, create=False)
            with env.begin(write=True) as txn:
                txn.put(key, value, db=handle)


def _judge(tally: Tally, engine: int, case: Case, answer: str) -> None:
    if answer.startswith("ok "):
        tally.count(f"engine {engine}: {answer.removeprefix('ok ')}")
    else:
        tally.count(f"engine {engine}: broken")
        tally.broke(f"engine {engine}, {case.name}", answer)


def _check(directory: Path, words: Sequence[str]) -> str:
    digest, verify_fails = bytes.fromhex(words[0]), words[1] == "1"
    start = _reset_peak_bytes()
    got = _outcome(directory, lambda store: _get(store, digest))
    verified = _outcome(directory, specimen.verify)
    grown = _peak_bytes() - start
    if grown > MAX_GROWTH_BYTES:
        raise Violation(f"it took {grown >> 20} MiB; get: {got}; verify: {verified}")
    for what, answer in (("get", got), ("verify", verified)):
        if answer.startswith("untyped"):
            raise Violation(f"{what}: {answer}")
    if verify_fails and verified == "fine":
        raise Violation(f"verify finds nothing; get: {got}")
    return f"get {got}, verify {verified}"


def _get(store: casstore.Store, digest: bytes) -> None:
    for found in store.get_many([digest]):
        if found != _CONTENT:
            raise AssertionError("get returned other bytes")


def _outcome(directory: Path, ask: Callable[[casstore.Store], object]) -> str:
    try:
        with casstore.open(directory) as store:
            ask(store)
    except CasstoreError as exc:
        return type(exc).__name__
    except Exception as exc:
        return f"untyped {type(exc).__name__}: {exc}"[:200]
    return "fine"


def _reset_peak_bytes() -> int:
    """Reset this process's peak memory; returns its current memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this system does not report the peak memory of a process")


if __name__ == "__main__":
    serve(_check)
