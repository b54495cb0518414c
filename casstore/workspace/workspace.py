"""``Workspace``: a directory whose files are committed with a conversation, and restored.

``Workspace.commit`` takes a snapshot and commits it as a component of the session's checkpoint, in
one revision with the nodes. A fork shares it, and retention, gc, copies and exports treat it as
they treat every component.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from casstore.engine.files import open_regular, storage_error
from casstore.engine.protocol import Engine
from casstore.errors import (
    CasstoreError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    RestoreConflictError,
    SnapshotNotFoundError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.maintenance.progress import Progress
from casstore.objects.pieces import PieceReader
from casstore.session.data import CommitResult, Entry
from casstore.session.loading import At
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import restoring
from casstore.workspace.beneath import Beneath, Parts, check_root, shown
from casstore.workspace.cache import Cache, Records
from casstore.workspace.changes import (
    FileChange,
    compare,
    find_changes,
    stored_content,
    text_lines,
)
from casstore.workspace.restoring import Bases, RestorePlan, RestoreReport
from casstore.workspace.rules import Rules
from casstore.workspace.scan import HashingSink, Scanned, Settings, StoringSink, scan
from casstore.workspace.tree import (
    COMPONENT,
    Directory,
    Entries,
    SnapshotRoot,
    TreeReader,
    encode_root,
)

#: Larger files are left out, by name, unless the caller allows more.
MAX_FILE_BYTES: Final = 1 << 30
# Files longer than this are not shown in a text diff.
_SHOWN_BYTES: Final = 1 << 20


class Snapshot(NamedTuple):
    """A snapshot of a directory: the digest of its value, and the counts of the scan.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> snapshot = Workspace(files).snapshot(store)
    >>> snapshot.files, snapshot.size_bytes, snapshot.left_out
    (1, 4, {})
    """

    digest: Digest
    files: int
    size_bytes: int
    #: Paths of the directory that are not in the snapshot, and why; ignored paths are not listed.
    left_out: dict[str, str]
    ignored: int = 0
    #: Files that changed each time they were read: their content may be a mixture.
    unstable: tuple[str, ...] = ()
    files_read: int = 0
    bytes_read: int = 0

    @property
    def link(self) -> Link:
        """The link by which a checkpoint refers to it.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> snapshot = Workspace(files).snapshot(store)
        >>> store.get_value(snapshot.link.digest)["format"]
        'workspace/1'
        """
        return Link(self.digest)


class LogEntry(NamedTuple):
    """A revision whose files differ from those of the revision before it.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> result = Workspace(files).commit(session, turn="t7")
    >>> [(logged.entry.turn, logged.snapshot.files) for logged in snapshots(session)]
    [('t7', 0)]
    """

    entry: Entry
    snapshot: Snapshot


def _engine(place: Store | Session) -> Engine:
    if isinstance(place, Session):
        return place._runtime.engine
    if isinstance(place, Store):
        return place.engine
    raise InvalidInputError(
        f"a Store or a Session is needed, got {place!r:.80}; with asyncio, use "
        "casstore.workspace.aio.AsyncWorkspace"
    )


class Workspace:
    """A directory of files. The constructor does not read it.

    ``ignore`` are patterns as ``.gitignore`` writes them, in addition to ``DEFAULT_IGNORE`` unless
    ``defaults`` is False; with ``gitignore`` the ``.gitignore`` files of the tree count as well.
    Files of more than ``max_file_bytes`` are left out by name. A file that cannot be read raises
    UnreadablePathError, or with ``skip_unreadable`` is left out by name. ``cache`` is a file that
    remembers what was read, for other processes; without one, this object alone remembers it.
    ``component`` is the name under which checkpoints refer to the files.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("print('hello')")
    >>> ws = Workspace(files)
    >>> result = ws.commit(session, append=[NodeDraft("edit", "I wrote a.py")])
    >>> (files / "a.py").unlink()
    >>> ws.restore(session, force=True).created
    1
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        ignore: Sequence[str] = (),
        *,
        defaults: bool = True,
        gitignore: bool = False,
        max_file_bytes: int | None = MAX_FILE_BYTES,
        skip_unreadable: bool = False,
        cache: str | os.PathLike[str] | None = None,
        component: str = COMPONENT,
    ) -> None:
        self.path = os.path.abspath(check_root(path))
        if max_file_bytes is not None and (type(max_file_bytes) is not int or max_file_bytes < 0):
            raise InvalidInputError(
                f"max_file_bytes must be None or an int of at least 0, got {max_file_bytes!r:.40}"
            )
        if type(component) is not str or not component:
            raise InvalidInputError(f"component must be a non-empty str, got {component!r:.40}")
        self.component = component
        rules = Rules(
            ignore,
            defaults=defaults,
            more=f"{max_file_bytes} {bool(gitignore)} {bool(skip_unreadable)}",
        )
        self._settings = Settings(rules, max_file_bytes, bool(skip_unreadable), bool(gitignore))
        #: The snapshot that this object took last.
        self.last: Snapshot | None = None
        self._cache = Cache(None if cache is None else check_root(cache), self.path)

    def __repr__(self) -> str:
        return f"Workspace({self.path!r})"

    # --- taking snapshots ---------------------------------------------------------------------

    def snapshot(self, place: Store | Session, *, progress: Progress | None = None) -> Snapshot:
        """Store the directory as a value; files that did not change are not read again.

        Nothing refers to the snapshot yet: commit or pin it before its grace period ends, or gc
        removes it. ``progress`` is called after each file that was read; if it raises, the snapshot
        stops.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> ws = Workspace(files)
        >>> ws.snapshot(store).digest == ws.snapshot(store).digest
        True
        """
        engine = _engine(place)
        self._cache.load()
        with Beneath(self.path) as beneath:
            try:
                self.last = self._take(beneath, engine, self._cache.records, progress)
            except ObjectNotFoundError:
                # The cache names directories that gc has removed, or that only another store has:
                # scan again without it.
                self._cache.clear()
                self.last = self._take(beneath, engine, {}, progress)
        return self.last

    def component_link(self, place: Store | Session) -> Link:
        """Take a snapshot; returns the link to it, to be put into a checkpoint as a component.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> Workspace(files).component_link(session) == Workspace(files).snapshot(store).link
        True
        """
        return self.snapshot(place).link

    def commit(
        self,
        session: Session,
        *,
        append: Sequence[Any] = (),
        components: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> CommitResult:
        """Commit nodes, state and the files as they are, all in one revision or none of it.

        The same as ``session.append(…, workspace=self)``, with the fields of ``Commit``. A turn
        that is repeated with the same files returns the first result.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> result = Workspace(files).commit(session, append=[NodeDraft("n1", "done")], turn="t9")
        >>> result.revision, sorted(session.checkpoint().others)
        (3, ['workspace'])
        """
        if isinstance(session, Store):
            raise InvalidInputError(f"session must be a Session, got {session!r:.80}")
        link = self.snapshot(session, progress=progress).link
        components = {**(components or {}), self.component: link}
        return session.commit(append=append, components=components, **fields)

    def _take(
        self, beneath: Beneath, engine: Engine, known: Records, progress: Progress | None
    ) -> Snapshot:
        sink = StoringSink(engine)
        settings = self._scan_settings(engine)._replace(progress=progress)
        found = scan(beneath, sink, TreeReader(engine), known, settings)
        value = encode_root(found.top, found.files, found.size_bytes, found.left_out)
        digest = sink.value(value)
        self._cache.store(found.records, (digest,))
        return _snapshot(digest, found)

    def _scan_settings(self, engine: Engine, always: frozenset[Parts] = frozenset()) -> Settings:
        place = getattr(engine, "path", None)
        store = None
        if isinstance(place, str):
            try:
                status = os.stat(place)
                store = status.st_dev, status.st_ino
            except OSError:
                store = None
        return self._settings._replace(store=store, own=self._cache.own_paths(), always=always)

    # --- comparing ------------------------------------------------------------------------------

    def status(self, session: Session, at: At = None) -> list[FileChange]:
        """What changed in the directory since a revision of the session; nothing is stored.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> ws = Workspace(files)
        >>> result = ws.commit(session)
        >>> size = (files / "new.py").write_text("pass")
        >>> [(change.kind, change.path) for change in ws.status(session)]
        [('added', 'new.py')]
        """
        engine = _engine(session)
        old = self._root(session, at)
        self._cache.load()
        with Beneath(self.path) as beneath:
            found, read_now = self._look(beneath, engine)
        reader = TreeReader(engine)
        return find_changes(compare(reader.entries, old.top, read_now, found.top))

    def status_text(self, session: Session, change: FileChange) -> list[str]:
        """A change that ``status`` returned, as lines of a unified diff.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> ws = Workspace(files)
        >>> result = ws.commit(session)
        >>> size = (files / "new.py").write_text("pass")
        >>> ws.status_text(session, ws.status(session)[0])[-1]
        '+pass'
        """
        reader = PieceReader(_engine(session))
        with Beneath(self.path) as beneath:

            def read(change: FileChange, entry: Any) -> bytes | None:
                if entry is not change.new or isinstance(entry, Directory):
                    return stored_content(reader, entry)
                return _present_content(beneath, tuple(change.path.split("/")), entry)

            return text_lines(change, read)

    def _look(self, beneath: Beneath, engine: Engine) -> tuple[Scanned, Any]:
        """Scan the directory, storing nothing; the result, and a function that reads its maps."""
        sink = HashingSink()
        reader = TreeReader(engine)
        found = scan(beneath, sink, reader, self._cache.records, self._scan_settings(engine))

        def read_now(digest: bytes, parts: Parts) -> Entries:
            known = sink.maps.get(digest)
            return reader.entries(digest, parts) if known is None else known

        return found, read_now

    # --- restoring ------------------------------------------------------------------------------

    def plan_restore(self, session: Session, at: At = None) -> RestorePlan:
        """What ``restore`` would do; nothing is changed. A missing directory counts as empty.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> ws = Workspace(files)
        >>> result = ws.commit(session, label="before")
        >>> size = (files / "new.py").write_text("pass")
        >>> result = ws.commit(session)
        >>> ws.plan_restore(session, "before").deleted
        ('new.py',)
        """
        engine = _engine(session)
        target = self._root(session, at)
        with ExitStack() as closing:
            path = self.path
            if not os.path.lexists(path):
                path = closing.enter_context(TemporaryDirectory(prefix="casstore-plan-"))
            beneath = closing.enter_context(Beneath(path))
            return self._plan(beneath, engine, target, session)

    def restore(self, session: Session, at: At = None, *, force: bool = False) -> RestoreReport:
        """Make the directory what it was at a revision of the session.

        RestoreConflictError, and nothing is changed, if a file was changed since the last
        snapshot. With ``force`` such files are overwritten and files that no snapshot has are
        deleted, after a snapshot of the present state, which a pin keeps (``saved_pin``). Ignored
        files are left alone. If the process is killed, the same call finishes the restore; without
        a ``cache`` it may need ``force``.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> ws = Workspace(files)
        >>> result = ws.commit(session, label="before")
        >>> size = (files / "new.py").write_text("pass")
        >>> result = ws.commit(session)
        >>> ws.restore(session, "before").deleted, list(files.iterdir())
        (1, [])
        """
        return self._restore(session, self._root(session, at), force=force)

    def restore_snapshot(
        self, place: Store | Session, digest: bytes, *, force: bool = False
    ) -> RestoreReport:
        """As ``restore``, to a snapshot by digest, such as one that a forced restore has pinned.

        If ``place`` is a session, files that equal those of its newest snapshot are no conflicts.

        >>> files = place / "files"
        >>> files.mkdir()
        >>> size = (files / "a.py").write_text("pass")
        >>> ws = Workspace(files)
        >>> kept = ws.snapshot(session)
        >>> (files / "a.py").unlink()
        >>> ws.restore_snapshot(session, kept.digest, force=True).created
        1
        """
        return self._restore(place, TreeReader(_engine(place)).root(digest), force=force)

    def _restore(
        self, place: Store | Session, target: SnapshotRoot, *, force: bool
    ) -> RestoreReport:
        engine = _engine(place)
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as exc:
            raise storage_error(f"cannot create directory {self.path}", exc) from exc
        with Beneath(self.path) as beneath:
            beneath.lock()
            plan = self._plan(beneath, engine, target, place)
            stopping = restoring.forced_conflicts(plan, force=force)
            if stopping:
                raise RestoreConflictError(stopping)
            saved: Snapshot | None = None
            pin: str | None = None
            if force and (plan.conflicts or plan.untracked):
                saved = self._save(beneath, engine, plan)
                pin = _pin(place, saved)
            bases = (*self._cache.bases, *([] if saved is None else [saved.digest]))
            self._remember(tuple(dict.fromkeys((*bases, target.digest))))
            report = restoring.execute(beneath, engine, plan, force=force)
            self._remember((target.digest,))
        return report._replace(saved=None if saved is None else saved.digest, saved_pin=pin)

    def _remember(self, bases: tuple[Digest, ...]) -> None:
        self._cache.store(self._cache.records, bases)

    def _save(self, beneath: Beneath, engine: Engine, plan: RestorePlan) -> Snapshot:
        """Store the present state, with everything that a forced restore would destroy."""
        endangered = [step for step in (*plan.steps, *plan.untracked_steps) if step.old is not None]
        always = frozenset(
            [step.parts[:depth] for step in endangered for depth in range(len(step.parts) + 1)]
        )
        sink, reader = StoringSink(engine), TreeReader(engine)
        settings = self._scan_settings(engine, always)
        try:
            found = scan(beneath, sink, reader, self._cache.records, settings)
            value = encode_root(found.top, found.files, found.size_bytes, found.left_out)
            digest = sink.value(value)
        except ObjectNotFoundError:
            sink = StoringSink(engine)
            found = scan(beneath, sink, reader, {}, settings)
            value = encode_root(found.top, found.files, found.size_bytes, found.left_out)
            digest = sink.value(value)
        kept = Bases(reader.entries, [reader.root(digest)])
        lost = [
            (shown(step.parts), "changed while it was being saved")
            for step in endangered
            if not isinstance(step.old, Directory) and step.old not in kept.find(step.parts)
        ]
        if lost:
            raise RestoreConflictError(lost)
        return _snapshot(digest, found)

    def _plan(
        self, beneath: Beneath, engine: Engine, target: SnapshotRoot, place: Store | Session
    ) -> RestorePlan:
        self._cache.load()
        reader = TreeReader(engine)
        sink = HashingSink()
        settings = self._scan_settings(engine)
        found = scan(beneath, sink, reader, self._cache.records, settings)
        bases = Bases(reader.entries, self._bases(engine, place))
        return restoring.make_plan(beneath, reader, target, bases, found, sink, settings.store)

    def _bases(self, engine: Engine, place: Store | Session) -> list[SnapshotRoot]:
        """The snapshots that the directory may hold, as far as they are stored."""
        names = list(self._cache.bases)
        newest = _component(place, None, self.component) if isinstance(place, Session) else None
        if newest is not None:
            names.append(newest)
        roots = []
        for name in dict.fromkeys(names):
            try:
                roots.append(TreeReader(engine).root(name))
            except CasstoreError:
                # gc has removed this snapshot: files that only it had are conflicts.
                continue
        return roots

    def _root(self, session: Session, at: At) -> SnapshotRoot:
        digest = _component(session, at, self.component)
        if digest is None:
            raise SnapshotNotFoundError(session.id, at, self.component)
        return TreeReader(_engine(session)).root(digest)


def _snapshot(digest: Digest, found: Scanned) -> Snapshot:
    return Snapshot(
        digest=digest,
        files=found.files,
        size_bytes=found.size_bytes,
        left_out=found.left_out,
        ignored=found.ignored,
        unstable=found.unstable,
        files_read=found.files_read,
        bytes_read=found.bytes_read,
    )


def _present_content(beneath: Beneath, parts: Parts, entry: Any) -> bytes | None:
    try:
        above = beneath.open(parts[:-1])
        if hasattr(entry, "target"):
            return os.fsencode(os.readlink(parts[-1], dir_fd=above))
        with os.fdopen(open_regular(parts[-1], dir_fd=above), "rb") as file:
            content: bytes = file.read(_SHOWN_BYTES + 1)
            return content
    except OSError:
        return None


def _pin(place: Store | Session, saved: Snapshot) -> str:
    from casstore.session import pins

    runtime = place._runtime
    session = place.id if isinstance(place, Session) else None
    owner = "" if session is None else f"{session}/"
    name = f"workspace/{owner}{runtime.engine.now_ms()}-{saved.digest.hex()[:8]}"
    pins.put(
        runtime,
        name,
        saved.digest,
        ttl_ms=None,
        note="the files before a forced restore",
        is_tag=False,
        move=False,
        session=session,
    )
    return name


def _component(session: Session, at: At, component: str) -> Digest | None:
    if session.head() is None:
        return None
    link = (session.checkpoint(at).others or {}).get(component)
    return link.digest if isinstance(link, Link) else None


def find_snapshot(
    session: Session, at: At = None, *, component: str = COMPONENT
) -> Snapshot | None:
    """The snapshot in a revision of a session; None if the revision has none.

    >>> find_snapshot(session) is None
    True
    >>> files = place / "files"
    >>> files.mkdir()
    >>> result = Workspace(files).commit(session)
    >>> find_snapshot(session).files
    0
    """
    digest = _component(session, at, component)
    if digest is None:
        return None
    root = TreeReader(_engine(session)).root(digest)
    return Snapshot(digest, root.files, root.size_bytes, root.left_out)


def restore(
    session: Session,
    *,
    into: str | os.PathLike[str],
    at: At = None,
    force: bool = False,
    **options: Any,
) -> RestoreReport:
    """Restore the files of a session into a directory; ``options`` are those of ``Workspace``.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> result = Workspace(files).commit(session)
    >>> restore(session, into=place / "elsewhere").created
    1
    >>> (place / "elsewhere" / "a.py").read_text()
    'pass'
    """
    return Workspace(into, **options).restore(session, at, force=force)


def diff(
    session: Session, old: At, new: At = None, *, component: str = COMPONENT
) -> list[FileChange]:
    """What changed in the files between two revisions of a session.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> ws = Workspace(files)
    >>> before = ws.commit(session).revision
    >>> path = (files / "a.py").rename(files / "b.py")
    >>> result = ws.commit(session)
    >>> [(change.kind, change.old_path, change.path) for change in diff(session, before)]
    [('renamed', 'a.py', 'b.py')]
    """
    first = _component(session, old, component)
    second = _component(session, new, component)
    if second is None:
        raise SnapshotNotFoundError(session.id, new, component)
    return diff_snapshots(session, first, second)


def diff_snapshots(
    place: Store | Session, old: bytes | None, new: bytes | None
) -> list[FileChange]:
    """What changed between two snapshots by digest; None is an empty one.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> snapshot = Workspace(files).snapshot(store)
    >>> [(change.kind, change.path) for change in diff_snapshots(store, None, snapshot.digest)]
    [('added', 'a.py')]
    """
    reader = TreeReader(_engine(place))
    first = None if old is None else reader.root(old).top
    second = None if new is None else reader.root(new).top
    return find_changes(compare(reader.entries, first, reader.entries, second))


def diff_text(place: Store | Session, change: FileChange) -> list[str]:
    """A change between two stored snapshots as lines of a unified diff.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> snapshot = Workspace(files).snapshot(store)
    >>> [added] = diff_snapshots(store, None, snapshot.digest)
    >>> diff_text(store, added)
    ['--- /dev/null', '+++ b/a.py', '@@ -0,0 +1 @@', '+pass']
    """
    reader = PieceReader(_engine(place))
    return text_lines(change, lambda _, entry: stored_content(reader, entry))


def snapshots(session: Session, *, component: str = COMPONENT) -> Iterator[LogEntry]:
    """The revisions whose files differ from the revision before, newest first.

    >>> files = place / "files"
    >>> files.mkdir()
    >>> result = Workspace(files).commit(session)
    >>> [logged.entry.revision for logged in snapshots(session)]
    [3]
    """
    later: tuple[Entry, Digest | None] | None = None
    for entry in session.history():
        try:
            digest = _component(session, entry.revision, component)
        except NotFoundError:
            # Retention has removed the revision since it was listed.
            continue
        if later is not None and later[1] is not None and later[1] != digest:
            yield _logged(session, *later)
        later = entry, digest
    if later is not None and later[1] is not None:
        yield _logged(session, *later)


def _logged(session: Session, entry: Entry, digest: Digest | None) -> LogEntry:
    assert digest is not None
    root = TreeReader(_engine(session)).root(digest)
    return LogEntry(entry, Snapshot(digest, root.files, root.size_bytes, root.left_out))
