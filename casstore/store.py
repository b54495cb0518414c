"""The store: blobs and values by digest, in one directory.

``open`` gives a ``Store``. Everything it offers is one call, one transaction: it
happens wholly or not at all, and what it returns is as durable as the store was
opened to be (P5). A store may be used from many threads and opened by many
processes at the same time.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from casstore.engine.files import importing
from casstore.engine.forks import Lock
from casstore.engine.paths import path_text
from casstore.engine.protocol import (
    COLD_AGE_MS,
    MAX_STAMP_MS,
    Engine,
    NewObject,
    Packing,
    PackReport,
    StoredObject,
    Write,
)
from casstore.errors import ClosedError, InvalidInputError
from casstore.format import splitting
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.format.limits import CHUNKED_BLOB_MIN_BYTES, DEFAULT_MAX_BYTES
from casstore.objects import blobs, values
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter

if TYPE_CHECKING:
    from casstore.engine.lmdb.dictionaries import DictionaryReport
    from casstore.objects.diff import Change
    from casstore.objects.edit import Edit
    from casstore.session.compare import Comparison
    from casstore.session.data import Entry, Head, Node, NodeDraft, Pin, SessionInfo, SessionMeta
    from casstore.session.session import Session
    from casstore.session.state import Runtime

# An engine is imported when a store is opened on it, and viewing, editing, comparing and
# sessions by the methods that do so: together they are most of what importing all would cost.

_READ_BATCH = 256
_SERVERS = ("postgresql://", "postgres://")
# What somebody writes who means a server, be it one of another kind or misspelled.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|postgres(ql)?:", re.IGNORECASE)


def open(
    path: str | os.PathLike[str],
    durability: str = "full",
    readonly: bool = False,
    *,
    create: bool = True,
    verify: bool = False,
    map_bytes: int | None = None,
    log_bytes: int | None = None,
    cache_bytes: int = 32 << 20,
    lmdb_version: int | None = None,
    auto_train: bool = True,
    auto_pack: bool = False,
) -> Store:
    """Open the store at ``path``, creating it if it is not there.

    ``path`` is a directory, or ``postgresql://…`` for a store on a server that many machines
    share (``docs/postgres.md``); what is said of LMDB and its file below is then refused.
    ``durability`` says what a call that writes waits for: ``full`` until a power loss cannot undo
    it; ``relaxed`` does not wait, and a power loss may undo what was committed within the last
    moment. Either survives the death of the process. Processes may choose differently, and so
    may each commit.
    ``readonly`` never writes and never creates. ``verify`` checks the whole file before
    LMDB maps it and every digest after; it needs the store for itself.
    ``map_bytes`` bounds the file (address space, not disk); by default the file may grow as long
    as the disk has space. ``log_bytes`` bounds the redo log, 16 MiB by default: a longer one is
    applied less often, and takes longer to read after a crash. ``cache_bytes`` bounds the
    inflated content kept in memory; ``lmdb_version`` (0 or 1) picks LMDB's file format for a new
    store. ``auto_train`` tries compression dictionaries now and then, in a thread of its own, as
    content grows; ``auto_pack`` does so with ``pack``, for programs that run long and have nobody
    else to call it.

    >>> with casstore.open(place / "new") as store:
    ...     name = store.put_value({"role": "user", "text": "hello"})
    ...     store.get_value(name)["text"]
    'hello'
    """
    place = path_text(path)
    _check_options(
        durability,
        map_bytes,
        log_bytes,
        cache_bytes,
        lmdb_version,
        readonly=readonly,
        create=create,
        verify=verify,
        auto_train=auto_train,
        auto_pack=auto_pack,
    )
    if is_server(place):
        told = (verify, map_bytes, log_bytes, lmdb_version, auto_train, auto_pack)
        if told != (False, None, None, None, True, False):
            raise InvalidInputError(
                "verify, map_bytes, log_bytes, lmdb_version, auto_train and auto_pack are for "
                "stores in a directory, not on a server"
            )
        return Store(
            _on_server(
                place,
                durability=durability,
                readonly=readonly,
                create=create,
                cache_bytes=cache_bytes,
            )
        )
    url = _URL.match(place)
    if url is not None:
        # Taken for a directory it would be made, and everything would go there unseen.
        raise InvalidInputError(
            f"{url[0]}… names no store; one is a directory, or {_SERVERS[0]}HOST/DATABASE"
        )
    with importing():
        from casstore.engine.lmdb import sharing

    engine = sharing.acquire(
        place,
        durability=durability,
        readonly=readonly,
        create=create,
        verify=verify,
        map_bytes=map_bytes,
        log_bytes=log_bytes,
        cache_bytes=cache_bytes,
        lmdb_version=lmdb_version,
        auto_train=auto_train,
        auto_pack=auto_pack,
    )
    return Store(engine, close=lambda: sharing.release(engine))


def _check_options(
    durability: str,
    map_bytes: int | None,
    log_bytes: int | None,
    cache_bytes: int,
    lmdb_version: int | None,
    **flags: bool,
) -> None:
    """Refuse values that are wrong for any store, also for one that is open already."""
    from casstore.session.arguments import check_count, check_flag, is_durable

    if is_durable(durability) is None:
        raise InvalidInputError("durability must be 'full' or 'relaxed', got None")
    for name, flag in flags.items():
        check_flag(flag, name)
    if map_bytes is not None:
        check_count(map_bytes, "map_bytes", least=1)
    if log_bytes is not None:
        check_count(log_bytes, "log_bytes", least=512 << 10)
    check_count(cache_bytes, "cache_bytes")
    if lmdb_version is not None and (type(lmdb_version) is not int or lmdb_version not in (0, 1)):
        raise InvalidInputError(f"lmdb_version is 0, 1 or None, not {lmdb_version!r:.40}")


def is_server(place: str) -> bool:
    """Does this name a store on a server, and not a directory?"""
    return place.startswith(_SERVERS)


def shown_place(place: str) -> str:
    """A store's place as it may be shown to anybody: a URL without its password."""
    if not is_server(place):
        return place
    with importing():
        from casstore.engine.postgres.address import split

    kind, who, where, parameters = split(place)
    told = "&".join(
        [word for word in parameters if not word.partition("=")[0].endswith("password")]
    )
    user = re.split("[:@]", who)[0] + "@" if who else ""
    said = f"{kind}{user}{where}"
    return f"{said}?{told}" if told else said


def _on_server(url: str, **options: Any) -> Engine:
    try:
        with importing():
            from casstore.engine.postgres import address
            from casstore.engine.postgres.engine import PostgresEngine
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in ("psycopg", "psycopg_pool"):
            raise
        raise InvalidInputError(
            "a store on PostgreSQL needs psycopg: "
            "pip install '.[postgres]' in the clone of casstore"
        ) from exc
    where = address.parse(url)
    if where.cache is not None:
        with importing():
            from casstore.engine.lmdb.disk_cache import DiskCache

        options["spare"] = DiskCache(where.cache, where.cache_mib << 20)
    return PostgresEngine(where, **options)


def check_store(store: Any) -> None:
    """Refuse what is no store: a path is opened first, and what is awaited has a ``sync``."""
    if not isinstance(store, Store):
        raise InvalidInputError(f"a store is what casstore.open gives, not {store!r:.80}")


class Store:
    """Blobs and values by digest. Use as a context manager, or call ``close``.

    ``Store(engine)`` runs on any engine; ``casstore.open`` is the usual way to one.

    The examples of its methods use ``store``, an open store, and ``place``, a directory. In the
    store is the session ``s``: a question, labelled ``start``, and then the answer.

    >>> digest = store.put_value({"role": "user", "text": "hello"})
    >>> store.get_value(digest)["text"]
    'hello'
    >>> store.session("s").head().leaf
    'left'
    """

    def __init__(self, engine: Engine, *, close: Callable[[], None] | None = None) -> None:
        self._open_engine: Engine | None = engine
        self._close = close or engine.close
        self._closing = Lock()
        self._made_runtime: Runtime | None = None

    @property
    def engine(self) -> Engine:
        """Where this store keeps its objects and rows; ClosedError once it is closed.

        >>> store.engine.path == str(place / "store")
        True
        """
        if self._open_engine is None:
            raise ClosedError("this store is closed")
        return self._open_engine

    def close(self) -> None:
        """Let go of the files. Closing twice is allowed.

        >>> store.close()
        >>> store.put_blob(b"too late")
        Traceback (most recent call last):
        casstore.errors.ClosedError: this store is closed
        """
        with self._closing:
            if self._open_engine is not None:
                self._open_engine = None
                self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def flush(self) -> None:
        """Make all that was written so far survive a power loss.

        >>> with casstore.open(place / "quick", "relaxed") as quick:
        ...     digests = [quick.put_blob(b"%d" % number) for number in range(100)]
        ...     quick.flush()  # one flush for all
        """
        self.engine.flush()

    def train_dictionary(self) -> DictionaryReport:
        """Train a compression dictionary on what is stored; adopt it if it saves 10% or more.

        >>> store.train_dictionary().adopted is None  # there is too little to learn from
        True
        """
        with importing():
            from casstore.engine.lmdb.engine import LmdbEngine

        engine = self.engine
        if not isinstance(engine, LmdbEngine):
            raise InvalidInputError("only an LMDB engine compresses with dictionaries")
        return engine.train_dictionary()

    def pack(self, *, min_age_ms: int = COLD_AGE_MS) -> PackReport:
        """Rewrite small slabs into large ones: less space, and long paths are read faster.

        What was stored within ``min_age_ms`` is left as it is. In short steps, beside running
        readers and writers; it can be stopped at any moment. ``maintenance.pack`` is the
        same and tells how far it has come.

        >>> digests = [store.put_value({"step": step}) for step in range(100)]
        >>> report = store.pack(min_age_ms=0)
        >>> report.slabs_after < report.slabs_before
        True
        """
        engine = self.engine
        if not isinstance(engine, Packing):
            raise InvalidInputError("the engine of this store has nothing to pack")
        if type(min_age_ms) is not int or not 0 <= min_age_ms <= MAX_STAMP_MS:
            raise InvalidInputError(f"an age of 0 ms or more, not {min_age_ms!r}")
        return engine.pack(min_age_ms=min_age_ms)

    # --- putting ------------------------------------------------------------------------

    def put_blob(self, content: bytes) -> Digest:
        """Store opaque bytes; ``b3sum`` of them prints the digest.

        >>> digest = store.put_blob(b"hello")
        >>> digest == Digest.of_blob(b"hello")
        True
        """
        if type(content) is not bytes:
            raise InvalidInputError(f"a blob is made of bytes, not {type(content).__name__}")
        if len(content) >= CHUNKED_BLOB_MIN_BYTES:
            return self.put_many((content,))[0]
        digest = Digest.of_blob(content)
        self.engine.write(Write(objects=(NewObject(digest, Kind.BLOB, content, ()),)))
        return digest

    def put_value(self, value: Any) -> Digest:
        """Store a value: dict, list, str, bytes, int, float, bool, None and Link.

        The order of keys does not matter: equal values have one digest, and are stored once.

        >>> store.put_value({"a": 1, "b": [2, None]}) == store.put_value({"b": [2, None], "a": 1})
        True
        """
        writer = PieceWriter()
        digest = Digest(splitting.split(value, writer.emit))
        writer.flush(self.engine)
        return digest

    def put_many(self, items: Iterable[Any]) -> list[Digest]:
        """Store many at once, all or none: ``bytes`` as blobs, anything else as values.

        >>> image, message = store.put_many([b"pixels", {"role": "user", "text": "look"}])
        >>> store.get_blob(image), store.get_value(message)["text"]
        (b'pixels', 'look')
        """
        if not isinstance(items, Iterable) or isinstance(items, str | bytes | dict):
            # One of these is a single value, and would be stored piecemeal.
            raise InvalidInputError(f"blobs and values are a list, not {type(items).__name__}")
        writer = PieceWriter()
        digests = [
            Digest(
                writer.emit(Kind.BLOB, item, [])
                if type(item) is bytes
                else splitting.split(item, writer.emit)
            )
            for item in items
        ]
        writer.flush(self.engine)
        return digests

    def put_stream(self, source: BinaryIO) -> Digest:
        """Store everything a binary file has to give, as one blob, in little memory.

        >>> file = place / "large.bin"
        >>> file.write_bytes(b"all of it" * 100_000)
        900000
        >>> with file.open("rb") as source:
        ...     digest = store.put_stream(source)
        >>> digest == Digest.of_blob(file.read_bytes())
        True
        """
        return blobs.put_stream(self.engine, source)

    # --- getting --------------------------------------------------------------------------

    def get_blob(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
        """The content of a blob, verified; LimitError if it is longer than ``max_bytes``.

        >>> digest = store.put_blob(b"hello")
        >>> store.get_blob(digest)
        b'hello'
        """
        _check_limit(max_bytes)
        reader = PieceReader(self.engine)
        return blobs.read_blob(reader, digest, reader.get(digest), max_bytes=max_bytes)

    def get_value(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """A value, verified; LimitError if it takes more than ``max_bytes``.

        >>> digest = store.put_value(["a", 1, None])
        >>> store.get_value(digest)
        ['a', 1, None]
        """
        _check_limit(max_bytes)
        reader = PieceReader(self.engine)
        return values.read_value(reader, digest, reader.get(digest), max_bytes=max_bytes)

    def get_many(
        self, digests: Sequence[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> list[Any]:
        """Many at once, in order, each as ``put_many`` took it.

        >>> digests = store.put_many([b"a blob", ["a", "value"]])
        >>> store.get_many(digests)
        [b'a blob', ['a', 'value']]
        """
        _check_limit(max_bytes)
        digests = _listed(digests)
        reader = PieceReader(self.engine)
        got: list[Any] = []
        for start in range(0, len(digests), _READ_BATCH):
            batch = digests[start : start + _READ_BATCH]
            for digest, item in zip(batch, reader.get_many(batch), strict=True):
                got.append(_read(reader, digest, item, max_bytes))
        return got

    def open_blob(self, digest: bytes) -> io.BufferedReader:
        """A blob as a seekable file; each part is verified before it is given.

        >>> digest = store.put_blob(b"0123456789" * 100_000)
        >>> with store.open_blob(digest) as file:
        ...     at = file.seek(500_005)
        ...     file.read(5)
        b'56789'
        """
        reader = PieceReader(self.engine)
        return io.BufferedReader(blobs.BlobReader(reader, digest, reader.get(digest)))

    def view(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """A large list or map, read on demand: see ``View``. Other values come as they are.

        >>> digest = store.put_value([{"step": step} for step in range(10_000)])
        >>> view = store.view(digest)
        >>> view[9_000]["step"], len(view)
        (9000, 10000)
        """
        with importing():
            from casstore.objects import view

        _check_limit(max_bytes)
        reader = PieceReader(self.engine)
        return view.open_view(reader, digest, reader.get(digest), max_bytes)

    def missing(self, digests: Sequence[bytes]) -> list[Digest]:
        """Those of ``digests`` that are not in the store.

        >>> here, elsewhere = store.put_blob(b"here"), Digest.of_blob(b"elsewhere")
        >>> store.missing([here, elsewhere]) == [elsewhere]
        True
        """
        digests = _listed(digests)
        return [Digest(digest) for digest in self.engine.missing(digests)]

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and not self.engine.missing((digest,))

    # --- changing and comparing --------------------------------------------------------------

    def edit(self, digest: bytes, *edits: Edit) -> Digest:
        """Store the value that ``edits``, one after the other, make of a stored one.

        Reads and writes only the pieces on the way; the result has the digest that
        storing the changed value whole would give.

        >>> old = store.put_value({"name": "draft", "steps": ["plan", "write"]})
        >>> new = store.edit(old, Set(["name"], "report"), Append(["steps"], "read again"))
        >>> store.get_value(new)
        {'name': 'report', 'steps': ['plan', 'write', 'read again']}
        """
        with importing():
            from casstore.objects import edit

        writer = PieceWriter()
        reader = PendingReader(self.engine, writer)
        if not edits:
            reader.get(digest)
        for change in edits:
            digest = edit.apply_edit(reader, digest, change, writer.emit)
        writer.keep_reachable(digest)
        writer.flush(self.engine)
        return Digest(digest)

    def diff(
        self, old: bytes, new: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> Iterator[Change]:
        """The changes that turn ``old`` into ``new``; reads only the pieces that differ.

        >>> old = store.put_value({"cwd": "/repo", "open": ["a.py"]})
        >>> new = store.put_value({"cwd": "/repo", "open": ["a.py", "b.py"]})
        >>> [(change.op, change.path, change.after) for change in store.diff(old, new)]
        [('added', ('open', 1), 'b.py')]
        """
        with importing():
            from casstore.objects import diff

        _check_limit(max_bytes)
        reader = PieceReader(self.engine)
        first, second = reader.get(old), reader.get(new)
        return diff.diff_objects(reader, (old, first), (new, second), max_bytes)

    # --- sessions ------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Runtime:
        if self._made_runtime is None:
            with importing():
                from casstore.session.state import Runtime

            self._made_runtime = Runtime(self)
        return self._made_runtime

    def session(self, session_id: str) -> Session:
        """A handle on one session; nothing is read or written yet.

        >>> session = store.session("new")
        >>> session.head() is None  # the first commit makes it
        True
        """
        with importing():
            from casstore.session.session import Session

        return Session(self._runtime, session_id)

    def create_session(
        self,
        session_id: str,
        *,
        name: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        parent: str | None = None,
        cause: Any = None,
        extra: Any = None,
        subjects: Sequence[str] = (),
        ttl_ms: int | None = None,
    ) -> SessionMeta:
        """Write down what is known of a session, unless something is: then that is returned.

        A session needs no creating before the first commit. ``subjects`` say whom it is
        about; they are added also to a session that is there. With ``ttl_ms`` it expires.

        >>> meta = store.create_session("trip", name="A trip to Rome", model="model-1")
        >>> store.create_session("trip", name="Another").name
        'A trip to Rome'
        """
        with importing():
            from casstore.session import catalogue

        return catalogue.create(
            self._runtime,
            session_id,
            name=name,
            model=model,
            cwd=cwd,
            parent=parent,
            cause=cause,
            extra=extra,
            about=subjects,
            ttl_ms=ttl_ms,
        )

    def sessions(
        self, *, after: str | None = None, limit: int | None = None, prefix: str = ""
    ) -> Iterator[SessionInfo]:
        """All sessions in order of id, from behind ``after`` on; read a page at a time.

        >>> head = store.fork("s", "t")
        >>> [(info.meta.session, info.first_user_message) for info in store.sessions()]
        [('s', 'which way?'), ('t', 'which way?')]
        """
        with importing():
            from casstore.session import catalogue

        return catalogue.list_sessions(self._runtime, after, limit, prefix)

    def delete_session(self, session_id: str) -> bool:
        """Take a session away for good; False if it is not there. Its id is not given again.

        What forks of it share stays; the rest is garbage from then on.

        >>> store.delete_session("s")
        True
        >>> list(store.sessions())
        []
        """
        with importing():
            from casstore.session import catalogue

        return catalogue.delete(self._runtime, session_id)

    def fork(
        self,
        source: str,
        target: str,
        *,
        at: int | str | Entry | None = None,
        node: str | None = None,
        subjects: Sequence[str] | None = None,
        append: Sequence[NodeDraft | Node] = (),
    ) -> Head:
        """Make a new session that stands where another does, or did ``at`` a revision.

        With ``node`` the fork ends in that node and has only the path to it. It is about
        whom the source is about, or about the ``subjects`` given. Whatever the session's
        length, one row is written; afterwards the two go their own ways. ``append`` takes
        nodes as a commit does: the fork begins with them, one revision later, in the same write.

        >>> store.fork("s", "another way", at="start").leaf
        'ask'
        >>> fork = store.session("another way")
        >>> result = fork.commit(Commit(append=[NodeDraft("right", "right")], lease=UNFENCED))
        >>> [node.id for node in fork.nodes()], [node.id for node in store.session("s").nodes()]
        (['ask', 'right'], ['ask', 'left'])
        >>> store.fork("s", "third way", at="start", append=[NodeDraft("on", "on")]).revision
        2
        """
        with importing():
            from casstore.session import forks
            from casstore.session.arguments import list_of
            from casstore.session.attempts import read_again

        # A second attempt must see the same subjects, also if the caller passed an iterator.
        about = None if subjects is None else list_of(subjects, "subjects")
        return read_again(
            lambda: forks.fork(self._runtime, source, target, at, node, about, append)
        )

    def sessions_about(self, subject: str) -> Iterator[str]:
        """The ids of the sessions about somebody, found without looking at others.

        >>> meta = store.create_session("trip", subjects=["anna"])
        >>> list(store.sessions_about("anna"))
        ['trip']
        """
        with importing():
            from casstore.session import subjects

        return subjects.sessions_of(self._runtime, subject)

    def compare(
        self,
        old: Session | str | tuple[str, int | str | Entry | None] | bytes,
        new: Session | str | tuple[str, int | str | Entry | None] | bytes,
    ) -> Comparison:
        """What turns one checkpoint into another; reads only what differs.

        Each side is a session (its head), a session id with a revision or label, or the
        digest of a manifest.

        >>> found = store.compare(("s", "start"), "s")
        >>> [node.id for node in found.added], found.ancestor.id
        (['left'], 'ask')
        """
        with importing():
            from casstore.session import compare
            from casstore.session.attempts import read_again

        return read_again(
            lambda: compare.compare(
                PieceReader(self.engine),
                self._runtime.index_cache,
                self._manifest_of(old),
                self._manifest_of(new),
            )
        )

    def _manifest_of(
        self, place: Session | str | tuple[str, int | str | Entry | None] | bytes
    ) -> bytes:
        with importing():
            from casstore.session.session import Session

        if isinstance(place, bytes):
            return place
        if isinstance(place, tuple) and len(place) != 2:
            raise InvalidInputError(f"a session id with a revision or label, not {place!r}")
        session, at = place if isinstance(place, tuple) else (place, None)
        name = session.id if isinstance(session, Session) else session
        return self._runtime.at(name, at).head.manifest

    def tag(self, name: str, digest: bytes, *, move: bool = False, note: str | None = None) -> Pin:
        """Let a name keep an object and all it links to, for good.

        NameTakenError if the name keeps another one, unless ``move``.

        >>> tag = store.tag("release", store.session("s").head().manifest, note="what we shipped")
        >>> store.compare(tag.digest, "s").equal
        True
        """
        with importing():
            from casstore.session import pins

        return pins.put(self._runtime, name, digest, ttl_ms=None, note=note, is_tag=True, move=move)

    def pin(
        self, name: str, digest: bytes, *, ttl_ms: int | None = None, note: str | None = None
    ) -> Pin:
        """Let a name keep an object and all it links to, for ``ttl_ms``; given again, anew.

        NameTakenError if the name is a tag: a pin must not end what a tag keeps for good.

        >>> digest = store.put_value({"plan": "not in a session yet"})
        >>> pin = store.pin("worker-1/plan", digest, ttl_ms=3_600_000)
        >>> pin.expires_at_ms - pin.created_at_ms
        3600000
        """
        with importing():
            from casstore.session import pins

        return pins.put(
            self._runtime, name, digest, ttl_ms=ttl_ms, note=note, is_tag=False, move=False
        )

    def unpin(self, name: str) -> bool:
        """Take a tag or pin away; False if there is none.

        >>> pin = store.pin("worker-1/plan", store.put_blob(b"a plan"))
        >>> store.unpin("worker-1/plan"), store.unpin("worker-1/plan")
        (True, False)
        """
        with importing():
            from casstore.session import pins

        return pins.remove(self._runtime, name)

    def find_pin(self, name: str) -> Pin | None:
        """A tag or pin; None if there is none, or its time is up.

        >>> tag = store.tag("release", store.session("s").head().manifest)
        >>> store.find_pin("release") == tag
        True
        >>> store.find_pin("nothing") is None
        True
        """
        with importing():
            from casstore.session import pins

        return pins.find(self._runtime, name)

    def pins(self, *, prefix: str = "", expired: bool = False) -> Iterator[Pin]:
        """Tags and pins by name; those whose time is up only with ``expired``.

        >>> for name in ("worker-1/plan", "worker-2/plan", "worker-2/notes"):
        ...     pin = store.pin(name, store.put_blob(b"work"))
        >>> [pin.name for pin in store.pins(prefix="worker-2/")]
        ['worker-2/notes', 'worker-2/plan']
        """
        with importing():
            from casstore.session import pins

        return pins.list_pins(self._runtime, prefix, expired=expired)


def _read(reader: PieceReader, digest: bytes, item: StoredObject, max_bytes: int) -> Any:
    if item.kind in (Kind.BLOB, Kind.ROPE):
        return blobs.read_blob(reader, digest, item, max_bytes=max_bytes)
    return values.read_value(reader, digest, item, max_bytes=max_bytes)


def _check_limit(max_bytes: int) -> None:
    if type(max_bytes) is not int or max_bytes < 0:
        raise InvalidInputError(f"max_bytes is a whole number from 0 on, not {max_bytes!r}")


def _listed(digests: Iterable[bytes]) -> Sequence[bytes]:
    """Digests that can be gone through more than once, as engines do."""
    if not isinstance(digests, Iterable) or isinstance(digests, str | bytes | dict):
        raise InvalidInputError(f"digests are a list, not {type(digests).__name__}")
    return digests if isinstance(digests, list | tuple) else list(digests)
