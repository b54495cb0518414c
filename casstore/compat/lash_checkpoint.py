"""The checkpoint that the head of lash names, and the frames in it, into a checkpoint here.

Its manifest and each component are blobs. One that is missing or damaged is an error that names it,
or is left out and told. What a component holds stays as it is; an execution state, which lash
spells as numbers, is bytes.
"""

from __future__ import annotations

from typing import Any, Final

from casstore.compat.lash_blobs import Blobs
from casstore.compat.lash_database import LashDatabase
from casstore.compat.lash_findings import Findings
from casstore.errors import DamagedSourceError, InvalidInputError
from casstore.records.json_values import storable
from casstore.session.data import Checkpoint

_MANIFEST_KEYS: Final = frozenset(
    (
        "schema_version", "turn_state", "tool_state_ref", "plugin_snapshot_ref",
        "plugin_snapshot_revision", "execution_state_ref",
    )
)  # fmt: skip
_LARGEST: Final = (1 << 63) - 1
_SNAPSHOT: Final = "execution_state_snapshot"

FRAMES: Final = "frames whose execution state is gone"
DAMAGED: Final = "damaged blobs that were left out"
STRANGE: Final = "keys of the checkpoint that are not known here, which stay behind"


class CheckpointReader:
    """The blobs of one database, read for its checkpoint."""

    def __init__(
        self, database: LashDatabase, blobs: Blobs, findings: Findings, *, leave_out: bool
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._findings = findings
        self._leave_out = leave_out

    def read(self, head: dict[str, Any]) -> Checkpoint:
        """What a head says, and what its checkpoint holds."""
        manifest: dict[str, Any] = {}
        ref = self._database.optional_text("the head", "checkpoint_ref", head)
        if ref is not None:
            found = self._component(ref, "the checkpoint")
            if found is not None and type(found) is not dict:
                raise self._blobs.damaged(ref, "the checkpoint is no map")
            manifest = found or {}
        for strange in sorted(manifest.keys() - _MANIFEST_KEYS):
            self._findings.add(STRANGE, strange)
        revision = manifest.get("plugin_snapshot_revision")
        if revision is not None and (type(revision) is not int or not 0 <= revision <= _LARGEST):
            raise self._blobs.damaged(str(ref), f"no plugin revision {revision!r:.40}")
        frames = head.get("agent_frames", [])
        if type(frames) is not list:
            raise self._database.damaged("the head", "its agent_frames are no list")
        frame = self._database.optional_text("the head", "current_agent_frame_id", head)
        return Checkpoint(
            manifest.get("turn_state"),
            self._named(manifest, ref, "tool_state"),
            self._named(manifest, ref, "plugin_snapshot"),
            revision,
            self._named(manifest, ref, "execution_state"),
            [self._frame(at, each) for at, each in enumerate(frames, 1)],
            frame or None,
            self._database.kept("the head", head.get("config")),
        )

    def content(self, ref: str, of: str) -> bytes | None:
        """The bytes of a blob that something needs; None if it is damaged, and left out."""
        try:
            return self._blobs.get(ref, of)
        except DamagedSourceError as exc:
            self._leave(ref, exc)
            return None

    def _leave(self, ref: str, damage: DamagedSourceError) -> None:
        """Go on without a blob, if that is wanted."""
        if not self._leave_out:
            raise damage
        self._findings.add(DAMAGED, ref)

    def _named(self, manifest: dict[str, Any], ref: str | None, name: str) -> Any:
        """A component that the checkpoint names; None if it names none."""
        of = manifest.get(f"{name}_ref")
        if of is None:
            return None
        if type(of) is not str:
            raise self._blobs.damaged(str(ref), f"{name}_ref is no text")
        return self._component(of, name)

    def _component(self, ref: str, of: str) -> Any:
        """What a blob holds; None if it is damaged, and left out."""
        try:
            value = self._blobs.value(ref, of)
            if of == "execution_state":
                return self._bytes(ref, value)
            try:
                return storable(value)
            except InvalidInputError as exc:
                raise self._blobs.damaged(ref, f"{of} holds more than JSON and bytes") from exc
        except DamagedSourceError as exc:
            self._leave(ref, exc)
            return None

    def _bytes(self, ref: str, value: Any) -> bytes:
        content = _as_bytes(value)
        if content is None:
            raise self._blobs.damaged(ref, "the execution state is no array of bytes")
        return content

    def _frame(self, number: int, frame: Any) -> Any:
        """A frame, with its execution state where that is still there.

        What only a frame names, lash does not keep; so this may be gone, and is no damage.
        """
        place = f"frame {number} of the head"
        if type(frame) is not dict:
            raise self._database.damaged(place, "it is no map")
        plain = {name: value for name, value in frame.items() if name != _SNAPSHOT}
        kept = self._database.kept(place, plain)
        snapshot = frame.get(_SNAPSHOT)
        if snapshot is not None:
            content = _as_bytes(snapshot)
            if content is None:
                raise self._database.damaged(place, "its execution state is no array of bytes")
        else:
            content = self._state_of(frame)
        if kept is not plain:
            # Kept as its text, it has no place for more.
            kept = {"frame": kept}
        return kept if content is None else {**kept, _SNAPSHOT: content}

    def _state_of(self, frame: dict[str, Any]) -> bytes | None:
        ref = frame.get("execution_state_ref")
        if type(ref) is not str:
            return None
        try:
            if self._blobs.find(ref) is None:
                self._findings.add(FRAMES, str(frame.get("frame_id")))
                return None
            return self._bytes(ref, self._blobs.value(ref, "the execution state of a frame"))
        except DamagedSourceError as exc:
            self._leave(ref, exc)
            return None


def _as_bytes(value: Any) -> bytes | None:
    """Bytes, which lash spells as numbers; None if they are none."""
    if type(value) is bytes:
        return value
    try:
        return bytes(value) if type(value) is list else None
    except (TypeError, ValueError):
        return None
