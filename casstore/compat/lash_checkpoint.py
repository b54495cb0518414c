"""Converts the checkpoint of a lash session, whose manifest and components are blobs.

A blob is stored as it is, or in an envelope of MessagePack: a descriptor, the compression (``None``
or ``Zlib``), and the content as bytes or as an array of numbers. Its name is the SHA-256 of the
content in hex. The reader verifies it, and limits the size before it inflates. A missing or
damaged blob raises DamagedSourceError with its name, or is left out and noted. The execution
state, an array of numbers in lash, becomes bytes; other components stay as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final, TypeVar

from casstore.compat.importing import Notes
from casstore.compat.lash_database import LashDatabase
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import DamagedSourceError, InvalidInputError
from casstore.format.canonical import unpack_trusted
from casstore.records.json_values import storable
from casstore.session.data import Checkpoint

Read = TypeVar("Read")

#: The most bytes of a blob, in the database and inflated. A checkpoint has a few MiB.
MAX_BLOB_BYTES: Final = 64 << 20

_STORED: Final = "None"
_ZLIB: Final = "Zlib"
_MANIFEST_KEYS: Final = frozenset(
    (
        "schema_version", "turn_state", "tool_state_ref", "plugin_snapshot_ref",
        "plugin_snapshot_revision", "execution_state_ref",
    )
)  # fmt: skip
_LARGEST: Final = (1 << 63) - 1
_SNAPSHOT: Final = "execution_state_snapshot"

_NO_STATE: Final = "frames whose execution state is gone"
_DAMAGED: Final = "damaged blobs, left out"
_UNKNOWN: Final = "unknown keys of the checkpoint, left out"


class LashBlobs:
    """The blobs of a database, verified and inflated."""

    def __init__(self, source: SqliteSource, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        #: The names of the blobs that were read.
        self.seen: set[str] = set()

    def find(self, name: str) -> bytes | None:
        """The content of a blob, or None. DamagedSourceError if it is damaged."""
        self.seen.add(name)
        asked = "SELECT length(content), typeof(content) FROM blobs WHERE hash = ?"
        for size, kind in self._source.ask(asked, (name,)):
            if kind != "blob":
                raise self.damaged(name, f"it is {kind}, not a blob")
            if size > self._max_bytes:
                raise self.damaged(name, f"its {size} bytes are more than {self._max_bytes}")
            [(stored,)] = self._source.ask("SELECT content FROM blobs WHERE hash = ?", (name,))
            return self._opened(name, stored)
        return None

    def get(self, name: str, of: str) -> bytes:
        """The content of a blob that ``of`` refers to; DamagedSourceError if it does not exist."""
        content = self.find(name)
        if content is None:
            raise self.damaged(name, f"it is missing, and {of} refers to it")
        return content

    def value(self, name: str, of: str) -> Any:
        """The MessagePack value in a blob that ``of`` refers to."""
        content = self.get(name, of)
        try:
            return unpack_trusted(content)
        except InvalidInputError as exc:
            raise self.damaged(name, f"{of} is not valid MessagePack") from exc

    def damaged(self, name: str, reason: str) -> DamagedSourceError:
        """The error for a blob that cannot be used."""
        return DamagedSourceError(str(self._source.path), f"blob {name}", reason)

    def _opened(self, name: str, stored: bytes) -> bytes:
        if sha256(stored).hexdigest() == name:
            return stored
        try:
            envelope = unpack_trusted(stored)
        except InvalidInputError as exc:
            raise self.damaged(
                name, "it has no envelope, and its content does not match its name"
            ) from exc
        if type(envelope) is not dict or not {"compression", "content"} <= envelope.keys():
            raise self.damaged(name, "its envelope has no content")
        content = _as_bytes(envelope["content"])
        if content is None:
            raise self.damaged(name, "its content is not bytes, and not an array of bytes")
        compression = envelope["compression"]
        if compression == _ZLIB:
            content = self._inflated(name, content)
        elif compression != _STORED:
            raise self.damaged(name, f"its compression {compression!r:.40} is unknown")
        found = sha256(content).hexdigest()
        if found != name:
            raise self.damaged(name, f"its content has the SHA-256 {found}")
        return content

    def _inflated(self, name: str, content: bytes) -> bytes:
        inflater = zlib.decompressobj()
        try:
            # One byte beyond the limit shows that there is more, without inflating it all.
            inflated = inflater.decompress(content, self._max_bytes + 1)
        except zlib.error as exc:
            raise self.damaged(name, f"it cannot be inflated: {exc}") from exc
        if len(inflated) > self._max_bytes:
            raise self.damaged(name, f"it inflates to more than {self._max_bytes} bytes")
        if not inflater.eof:
            raise self.damaged(name, "it ends in the middle")
        return inflated


class CheckpointReader:
    """The blobs of one database, read for its checkpoint."""

    def __init__(
        self, database: LashDatabase, blobs: LashBlobs, notes: Notes, *, leave_out: bool
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._notes = notes
        self._leave_out = leave_out

    def read(self, head: dict[str, Any]) -> Checkpoint:
        """The checkpoint of a head, with its frames."""
        manifest: dict[str, Any] = {}
        ref = self._database.optional_text("the head", "checkpoint_ref", head.get("checkpoint_ref"))
        if ref is not None:
            found = self._intact(ref, lambda: self._component(ref, "the checkpoint"))
            if found is not None and type(found) is not dict:
                raise self._blobs.damaged(ref, "the checkpoint is not a map")
            manifest = found or {}
        for key in sorted(manifest.keys() - _MANIFEST_KEYS):
            self._notes.add(_UNKNOWN, key)
        revision = manifest.get("plugin_snapshot_revision")
        if revision is not None and (type(revision) is not int or not 0 <= revision <= _LARGEST):
            raise self._blobs.damaged(str(ref), f"its plugin revision {revision!r:.40} is invalid")
        frames = head.get("agent_frames", [])
        if type(frames) is not list:
            raise self._database.damaged("the head", "its agent_frames are not a list")
        frame = self._database.optional_text(
            "the head", "current_agent_frame_id", head.get("current_agent_frame_id")
        )
        return Checkpoint(
            turn_state=manifest.get("turn_state"),
            tool_state=self._named(manifest, ref, "tool_state"),
            plugin_snapshot=self._named(manifest, ref, "plugin_snapshot"),
            plugin_revision=revision,
            execution_state=self._named(manifest, ref, "execution_state"),
            frames=[self._frame(at, each) for at, each in enumerate(frames, 1)],
            current_frame=frame or None,
            config=self._database.kept("the head", head.get("config")),
        )

    def content(self, ref: str, of: str) -> bytes | None:
        """The bytes of a blob that ``of`` refers to; None if it is damaged, and left out."""
        return self._intact(ref, lambda: self._blobs.get(ref, of))

    def _intact(self, ref: str, read: Callable[[], Read]) -> Read | None:
        """The result of ``read``; None if the blob is damaged, and left out."""
        try:
            return read()
        except DamagedSourceError:
            if not self._leave_out:
                raise
            self._notes.add(_DAMAGED, ref)
            return None

    def _named(self, manifest: dict[str, Any], ref: str | None, name: str) -> Any:
        """A component that the checkpoint refers to, or None."""
        of = manifest.get(f"{name}_ref")
        if of is None:
            return None
        if type(of) is not str:
            raise self._blobs.damaged(str(ref), f"{name}_ref is not a text")
        return self._intact(of, lambda: self._component(of, name))

    def _component(self, ref: str, of: str) -> Any:
        """The value of a blob."""
        if of == "execution_state":
            return self._state(ref, of)
        value = self._blobs.value(ref, of)
        try:
            return storable(value)
        except InvalidInputError as exc:
            raise self._blobs.damaged(ref, f"{of} holds more than JSON and bytes") from exc

    def _state(self, ref: str, of: str) -> bytes:
        """The execution state in a blob."""
        content = _as_bytes(self._blobs.value(ref, of))
        if content is None:
            raise self._blobs.damaged(ref, "the execution state is not an array of bytes")
        return content

    def _frame(self, number: int, frame: Any) -> Any:
        """A frame, with its execution state if the blob is there.

        lash deletes blobs that only a frame refers to, so a missing one is not damage.
        """
        place = f"frame {number} of the head"
        if type(frame) is not dict:
            raise self._database.damaged(place, "it is not a map")
        plain = {name: value for name, value in frame.items() if name != _SNAPSHOT}
        kept = self._database.kept(place, plain)
        snapshot = frame.get(_SNAPSHOT)
        if snapshot is not None:
            content = _as_bytes(snapshot)
            if content is None:
                raise self._database.damaged(place, "its execution state is not an array of bytes")
        else:
            content = self._state_of(frame)
        if kept is not plain:
            # The stored form is a dict with the frame's JSON text, to which no key may be added.
            kept = {"frame": kept}
        return kept if content is None else {**kept, _SNAPSHOT: content}

    def _state_of(self, frame: dict[str, Any]) -> bytes | None:
        ref = frame.get("execution_state_ref")
        if type(ref) is not str:
            return None

        def read() -> bytes | None:
            if self._blobs.find(ref) is None:
                self._notes.add(_NO_STATE, str(frame.get("frame_id")))
                return None
            return self._state(ref, "the execution state of a frame")

        return self._intact(ref, read)


def _as_bytes(value: Any) -> bytes | None:
    """Bytes, which lash encodes as an array of numbers; None if the value is neither."""
    if type(value) is bytes:
        return value
    try:
        return bytes(value) if type(value) is list else None
    except (TypeError, ValueError):
        return None
