"""The public class ``Store``: blobs and values by digest, sessions, and maintenance.

``open`` returns a ``Store``. A call that writes is usually one atomic transaction, as durable as
the ``durability`` that the store was opened with (P5); some calls, such as ``put_stream``,
``delete_session`` and maintenance, can use several. Many threads can share a store, and
many processes can open it at the same time.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from casstore.engine.files import importing, path_text
from casstore.engine.forks import Lock
from casstore.engine.protocol import (
    COLD_AGE_MS,
    DEFAULT_BATCH,
    DEFAULT_GRACE_MS,
    Engine,
    NewObject,
    PackReport,
    StoredObject,
    Write,
)
from casstore.errors import ClosedError, InvalidInputError
from casstore.format import splitting
from casstore.format.canonical import Link
from casstore.format.digest import Digest, Kind
from casstore.format.limits import CHUNKED_BLOB_MIN_BYTES, DEFAULT_MAX_BYTES
from casstore.objects import blobs, values
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter

if TYPE_CHECKING:
    from datetime import datetime

    from casstore.engine.lmdb.dictionaries import DictionaryReport
    from casstore.maintenance.check import CheckReport
    from casstore.maintenance.gc import GcReport
    from casstore.maintenance.progress import Progress
    from casstore.maintenance.retention import Policy, RetentionReport
    from casstore.maintenance.vacuum import VacuumReport
    from casstore.objects.diff import Change
    from casstore.objects.edit import Edit
    from casstore.session.compare import Comparison
    from casstore.session.data import Entry, Head, Pin, SessionInfo, SessionMeta
    from casstore.session.found import Hit
    from casstore.session.session import Session
    from casstore.session.state import Runtime

# Engines, views, edits, comparisons and sessions are imported when first used: together they are
# most of the import time.

_READ_BATCH = 256
_SERVERS = ("postgresql://", "postgres://")
# Matches URLs, including those of unsupported servers and mistyped ones.
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
    """Open the store at ``path``; create it if it does not exist.

    ``path`` is a directory, or ``postgresql://…`` for a store on a server that many machines
    share (``docs/guides/postgres.md``); the options for LMDB and its file are then refused.
    ``durability`` is what a call that writes waits for: ``full`` waits for the disk, so a power
    loss cannot undo the write; ``relaxed`` does not wait, and a power loss may undo the latest
    commits. Both survive a crash of the process. Each process and each commit can choose.
    With ``readonly`` the store is neither changed nor created. ``verify`` checks the whole file
    before LMDB maps it, and then every digest; the store must not be open elsewhere.
    ``map_bytes`` is the longest that the data file may become: it reserves address space, not
    disk space. By default the file may grow as long as the disk has space. ``log_bytes`` bounds
    the redo log, 16 MiB by default: a longer one is applied less often, and takes longer to read
    after a crash. ``cache_bytes`` bounds the inflated content kept in memory; ``lmdb_version`` (0
    or 1) picks LMDB's file format for a new store. ``auto_train`` trains a compression dictionary
    in a background thread when commits are so far apart that each becomes a short slab;
    ``auto_pack`` calls ``pack`` in such a thread, for long-running programs without scheduled
    maintenance.

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
        options = (verify, map_bytes, log_bytes, lmdb_version, auto_train, auto_pack)
        if options != (False, None, None, None, True, False):
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
        # As a path, it would silently create a directory of this name.
        raise InvalidInputError(
            f"path must be a directory or {_SERVERS[0]}HOST/DATABASE, got a URL with {url[0]}"
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
    """InvalidInputError if an option is invalid for every store, also for one that is open."""
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
        raise InvalidInputError(f"lmdb_version must be 0, 1 or None, got {lmdb_version!r:.60}")


def is_server(place: str) -> bool:
    """True if this is the URL of a store on a server; False: the path of a directory."""
    return place.startswith(_SERVERS)


def shown_place(place: str) -> str:
    """The path or URL of a store for messages: a URL without its password."""
    if not is_server(place):
        return place
    with importing():
        from casstore.engine.postgres.address import split

    scheme, userinfo, location, parameters = split(place)
    query = "&".join(
        [word for word in parameters if not word.partition("=")[0].endswith("password")]
    )
    user = re.split("[:@]", userinfo)[0] + "@" if userinfo else ""
    shown = f"{scheme}{user}{location}"
    return f"{shown}?{query}" if query else shown


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
            from casstore.engine.postgres.disk_cache import DiskCache

        options["spare"] = DiskCache(where.cache, where.cache_mib << 20)
    return PostgresEngine(where, **options)


def check_store(store: Any) -> None:
    """Raise InvalidInputError unless this is a Store, and not a path or an async store."""
    if not isinstance(store, Store):
        raise InvalidInputError(f"store must be an open Store, got {store!r:.60}")


class Store:
    """An open store. Use it as a context manager, or call ``close``.

    ``casstore.open`` returns one; ``Store(engine)`` is for an engine that the caller has made.

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
        """The engine that stores the objects and rows; ClosedError once the store is closed.

        >>> store.engine.path == str(place / "store")
        True
        """
        if self._open_engine is None:
            raise ClosedError("this store is closed")
        return self._open_engine

    def close(self) -> None:
        """Close the files. Closing twice is allowed.

        >>> store.close()
        >>> store.put_blob(b"too late")
        Traceback (most recent call last):
        casstore.errors.ClosedError: this store is closed
        """
        with self._closing:
            if self._open_engine is not None:
                self._open_engine = None
                if self._made_runtime is not None:
                    self._made_runtime.close()
                self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
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

    def pack(
        self, *, min_age_ms: int = COLD_AGE_MS, progress: Progress | None = None
    ) -> PackReport:
        """Rewrite small slabs into large ones: less space, and long paths are read faster.

        Objects stored within the last ``min_age_ms`` are left alone. Packing runs in short steps,
        concurrently with readers and writers, and can be interrupted at any time.

        >>> digests = [store.put_value({"step": step}) for step in range(100)]
        >>> report = store.pack(min_age_ms=0)
        >>> report.slabs_after < report.slabs_before
        True
        """
        with importing():
            from casstore.maintenance.pack import pack

        return pack(self, min_age_ms=min_age_ms, progress=progress)

    # --- maintenance --------------------------------------------------------------------

    def gc(
        self,
        *,
        grace_ms: int = DEFAULT_GRACE_MS,
        dry_run: bool = False,
        batch: int = DEFAULT_BATCH,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> GcReport:
        """Remove objects that no root reaches and that are older than ``grace_ms``.

        See ``maintenance.gc.collect``.

        >>> digest = store.put_blob(b"nothing refers to this")
        >>> store.gc(grace_ms=0).objects_swept, digest in store
        (1, False)
        """
        with importing():
            from casstore.maintenance import gc

        return gc.collect(
            self, grace_ms=grace_ms, dry_run=dry_run, batch=batch, progress=progress, stop=stop
        )

    def vacuum(
        self,
        *,
        sessions: Sequence[str] | None = None,
        grace_ms: int = DEFAULT_GRACE_MS,
        dry_run: bool = False,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> VacuumReport:
        """Remove hidden nodes and expired rows, then gc and pack; see ``maintenance.vacuum``.

        >>> hidden = session.tombstone(["ask"])
        >>> [done.nodes_removed for done in store.vacuum(grace_ms=0).sessions]
        [1]
        """
        with importing():
            from casstore.maintenance import vacuum

        return vacuum.vacuum(
            self,
            sessions=sessions,
            grace_ms=grace_ms,
            dry_run=dry_run,
            progress=progress,
            stop=stop,
        )

    def prune(
        self,
        *,
        sessions: Iterable[str] | None = None,
        prefix: str = "",
        policy: Policy | None = None,
        override_policies: bool = False,
        progress: Progress | None = None,
    ) -> RetentionReport:
        """Delete the revisions and sessions that the policy does not keep.

        The same as ``maintenance.retention.plan``, then ``execute``. ``gc`` reclaims the bytes.

        >>> from casstore.maintenance.retention import Policy
        >>> store.prune(policy=Policy(last=1, labelled=False)).revisions_removed
        1
        """
        with importing():
            from casstore.maintenance import retention

        plan = retention.plan(
            self,
            sessions=sessions,
            prefix=prefix,
            policy=policy,
            override_policies=override_policies,
            progress=progress,
        )
        return retention.execute(self, plan, progress=progress)

    def check(
        self,
        *,
        level: str = "connectivity",
        since_last: bool = False,
        share: float = 0.05,
        seed: int | None = None,
        max_findings: int = 100,
        progress: Progress | None = None,
    ) -> CheckReport:
        """Look for damage, and report it; see ``maintenance.check``.

        >>> store.check(level="full").sound
        True
        """
        with importing():
            from casstore.maintenance import check

        return check.check(
            self,
            level=level,
            since_last=since_last,
            share=share,
            seed=seed,
            max_findings=max_findings,
            progress=progress,
        )

    # --- putting ------------------------------------------------------------------------

    def put_blob(self, content: bytes) -> Digest:
        """Store opaque bytes; ``b3sum`` of them prints the digest.

        >>> digest = store.put_blob(b"hello")
        >>> digest == Digest.of_blob(b"hello")
        True
        """
        if type(content) is not bytes:
            raise InvalidInputError(f"content must be bytes, got {content!r:.60}")
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
            # Each of these is a single value; iterating would store its parts.
            raise InvalidInputError(f"items must be a list, got {items!r:.60}")
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
        """Store the content of a binary file as one blob, in bounded memory.

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
        """Blobs and values in the order of ``digests``; the counterpart of ``put_many``.

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
        """A blob as a seekable file; each part is verified before it is returned.

        >>> digest = store.put_blob(b"0123456789" * 100_000)
        >>> with store.open_blob(digest) as file:
        ...     at = file.seek(500_005)
        ...     file.read(5)
        b'56789'
        """
        reader = PieceReader(self.engine)
        return io.BufferedReader(blobs.BlobReader(reader, digest, reader.get(digest)))

    def view(self, digest: bytes | Link, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """A large list or map, read on demand: see ``View``. Other values are returned whole.

        Takes a digest, or a ``Link`` such as a component of a checkpoint.

        >>> digest = store.put_value([{"step": step} for step in range(10_000)])
        >>> view = store.view(digest)
        >>> view[9_000]["step"], len(view)
        (9000, 10000)
        >>> store.view(session.checkpoint().tool_state)["cwd"]
        '/repo'
        """
        with importing():
            from casstore.objects import view

        _check_limit(max_bytes)
        reader = PieceReader(self.engine)
        name = _target(digest)
        return view.open_view(reader, name, reader.get(name), max_bytes)

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

    def edit(self, digest: bytes | Link, *edits: Edit) -> Digest:
        """Apply ``edits``, in order, to a stored value, and store the result.

        Reads and writes only the pieces on the paths of the edits. The digest is the same as if the
        changed value were stored whole. ``Session.edit`` does this for a component of a session.

        >>> old = store.put_value({"name": "draft", "steps": ["plan", "write"]})
        >>> new = store.edit(old, Set(["name"], "report"), Append(["steps"], "read again"))
        >>> store.get_value(new)
        {'name': 'report', 'steps': ['plan', 'write', 'read again']}
        """
        with importing():
            from casstore.objects import edit

        writer = PieceWriter()
        reader = PendingReader(self.engine, writer)
        name = _target(digest)
        if not edits:
            reader.get(name)
        for change in edits:
            name = edit.apply_edit(reader, name, change, writer.emit)
        writer.keep_reachable(name)
        writer.flush(self.engine)
        return Digest(name)

    def diff(
        self, old: bytes | Link, new: bytes | Link, *, max_bytes: int = DEFAULT_MAX_BYTES
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
        before, after = _target(old), _target(new)
        first, second = reader.get(before), reader.get(after)
        return diff.diff_objects(reader, (before, first), (after, second), max_bytes)

    # --- sessions ------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Runtime:
        if self._made_runtime is None:
            with importing():
                from casstore.session.state import Runtime

            with self._closing:
                if self._made_runtime is None:
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
        """Store the metadata of a session; if it has metadata, return that unchanged.

        A session need not be created before its first commit. ``subjects`` are the people or things
        it is about; they are added to an existing session, too. With ``ttl_ms`` it expires.

        >>> meta = store.create_session("trip", name="A trip to Rome", model="model-1")
        >>> store.create_session("trip", name="Another").name
        'A trip to Rome'
        """
        with importing():
            from casstore.session import catalogue
            from casstore.session.subjects import checked

        return catalogue.create(
            self._runtime,
            session_id,
            name=name,
            model=model,
            cwd=cwd,
            parent=parent,
            cause=cause,
            extra=extra,
            about=checked(subjects),
            ttl_ms=ttl_ms,
        )

    def sessions(
        self, *, after: str | None = None, limit: int | None = None, prefix: str = ""
    ) -> Iterator[SessionInfo]:
        """The sessions in order of id, read in pages; with ``after``, only those after that id.

        >>> head = store.fork("s", "t")
        >>> [(info.meta.session, info.first_user_message) for info in store.sessions()]
        [('s', 'which way?'), ('t', 'which way?')]
        """
        with importing():
            from casstore.session import catalogue

        return catalogue.list_sessions(self._runtime, after, limit, prefix)

    def delete_session(self, session_id: str) -> bool:
        """Delete a session for good; False if it does not exist. Its id cannot be reused.

        Objects that its forks share stay; gc can collect the rest.

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
        append: Sequence[Any] = (),
    ) -> Head:
        """Create a session from the head of another, or from its revision ``at``.

        With ``node`` the fork ends in that node and has only the path to it. Its subjects are
        ``subjects``, or those of the source. Forking copies no objects, however long the session
        is; afterwards the two are independent. ``append`` takes nodes as a commit does: the first
        revision of the fork has them and is one revision later, in the same write.

        >>> store.fork("s", "another way", at="start").leaf
        'ask'
        >>> store.fork("s", "third way", at="start", append=["right"]).revision
        2
        """
        with importing():
            from casstore.session import forks

        return forks.fork(self._runtime, source, target, at, node, subjects, append)

    def sessions_about(self, subject: str) -> Iterator[str]:
        """The ids of the sessions with this subject, found through an index.

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
        *,
        describe: bool = True,
    ) -> Comparison:
        """The differences from one checkpoint to another; reads only what differs.

        Each side is a session (its head), a session id with a revision or label, or the
        digest of a manifest. ``describe=False`` leaves ``details`` empty, such as the changed
        files of a workspace, and does not read them.

        >>> found = store.compare(("s", "start"), "s")
        >>> [node.id for node in found.added], found.ancestor.id
        (['left'], 'ask')
        """
        with importing():
            from casstore.session import compare
            from casstore.session.attempts import read_again

        return read_again(
            lambda: compare.compare_places(self._runtime, old, new, describe=describe)
        )

    def search(
        self,
        words: str,
        *,
        kinds: Sequence[str] | None = None,
        sessions: Sequence[str] | None = None,
        since: int | datetime | None = None,
        limit: int = 20,
        max_sessions: int = 16,
        fresh: bool = True,
    ) -> list[Hit]:
        """The texts in which all ``words`` occur, best first, each once with its sessions.

        Searches the nodes and components of the heads of sessions, and the entries of record
        systems. Words in double quotes must follow each other; ``wor*`` finds words that begin
        so. ``kinds`` restricts it to ``node``, ``component`` or names of record systems;
        ``sessions`` to the texts of these sessions; ``since`` (milliseconds since 1970, or a
        datetime) to what was committed then or later. Only what can be read now is found: no
        hidden node, no deleted session. The index is brought up to date first, unless ``fresh``
        is False: then the newest texts may be missing.

        >>> [hit.node for hit in store.search("way")]
        ['ask']
        >>> [(hit.kind, hit.component) for hit in store.search("repo", kinds=["component"])]
        [('component', 'tool_state')]
        """
        with importing():
            from casstore.session import found

        return found.search(
            self,
            words,
            kinds=kinds,
            sessions=sessions,
            since=since,
            limit=limit,
            max_sessions=max_sessions,
            fresh=fresh,
        )

    def tag(self, name: str, digest: bytes, *, move: bool = False, note: str | None = None) -> Pin:
        """Make a name keep an object and all it links to alive, without end.

        NameTakenError if the name belongs to another object, unless ``move``.

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
        """Make a name keep an object and all it links to alive for ``ttl_ms``, by default for good.

        NameTakenError if the name is a tag: a pin, which may expire, must not replace it.

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
        """Remove a tag or pin; False if it does not exist.

        >>> pin = store.pin("worker-1/plan", store.put_blob(b"a plan"))
        >>> store.unpin("worker-1/plan"), store.unpin("worker-1/plan")
        (True, False)
        """
        with importing():
            from casstore.session import pins

        return pins.remove(self._runtime, name)

    def find_pin(self, name: str) -> Pin | None:
        """A tag or pin; None if it does not exist or has expired.

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
        """Tags and pins in order of name; expired pins only with ``expired``.

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


def _target(place: bytes | Link) -> bytes:
    """The digest of an object, or the one that a link leads to."""
    return place.digest if isinstance(place, Link) else place


def _check_limit(max_bytes: int) -> None:
    if type(max_bytes) is not int or max_bytes < 0:
        with importing():
            from casstore.session.arguments import check_count

        check_count(max_bytes, "max_bytes")


def _listed(digests: Iterable[bytes]) -> Sequence[bytes]:
    """The digests as a sequence: engines iterate over them more than once."""
    if not isinstance(digests, Iterable) or isinstance(digests, str | bytes | dict):
        raise InvalidInputError(f"digests must be a list, got {digests!r:.60}")
    return digests if isinstance(digests, list | tuple) else list(digests)
