"""Keys outside the store: destroying one erases what it encrypts, in backups too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from casstore.compat.agent_state import UserStore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Engine, PutRow, Write
from casstore.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    InvalidValueError,
    KeyDestroyedError,
    KeyMissingError,
    LimitError,
    RecordNotFoundError,
    StorageError,
)
from casstore.format.canonical import Link
from casstore.format.digest import subject_hash
from casstore.maintenance import backup, compact, erasure, gc
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Ref, Seal
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.user_data import NewValue
from casstore.store import Store
from casstore.testing.session_fixtures import ReadCounter
from tests.records.conftest import Clock
from tests.records.lifecycles.raw_bytes import everything, raw_files

encryption = pytest.importorskip(
    "casstore.records.lifecycles.encryption",
    reason="needs the extra: pip install '.[sealing]'",
    exc_type=ImportError,
)

GOLDEN = (
    "0175cdc6e8429af6fc1808f7f0fda8c162d3774d051cad13484587d7266d3a790108c0bc996dcc91"
    "d4bd2617bdbfe476e92d8c8b670d5d5fe3ab8fc8bc1e202e553f37ea7f075e662794bed6a9ad5af4"
    "07e22f265302e3194b77ac0ccf"
)
GOLDEN_ANNA = "4d526835115ceb262e3b7dac44ac91bcb7c73d32ec2e0bc3317e67d126822c90"
GOLDEN_SECRET_ANNA = "89d83c17919172a744b988e7371781a90f2f64d919257314ac500b24a6df9f3f"

SMALL, LONG = "CANARY-SMALL", "CANARY-LONG " + "secret " * 400


def names(folder: Path, ending: str = ".key") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(ending))


# --- the canary -------------------------------------------------------------------------------


def test_no_file_contains_encrypted_plaintext_and_destroying_the_key_erases_backups(
    tmp_path: Path,
) -> None:
    place, saved, keys = tmp_path / "store", tmp_path / "saved", FileKeys(tmp_path / "keys")
    with Store(LmdbEngine(str(place), durability="full")) as store:
        life = Lifecycles(store, keys=keys)
        life.users.put("anna", "small", SMALL)
        life.users.put("anna", "long", LONG)
        life.users.put("anna", "list", [SMALL, LONG, {"deep": [SMALL] * 50}])
        life.users.put("berta", "long", LONG)
        life.hold(life.users.ref("anna", "small"), Hold("law", store.engine.now_ms() + 1))
        backup.backup(store, saved)
        assert b"CANARY" not in everything(store)
        report = life.users.erase("anna")
        assert report.keys_destroyed >= 1
    for folder in (place, saved, tmp_path / "keys"):
        assert b"CANARY" not in raw_files(folder)
    with Store(LmdbEngine(str(saved), durability="full")) as old:
        life = Lifecycles(old, keys=keys)
        assert list(life.users.names("anna")) == ["list", "long", "small"]
        for name in ("list", "long"):
            with pytest.raises(KeyDestroyedError, match="erased"):
                life.users.get("anna", name)
        assert life.users.get("berta", "long") == LONG


def test_gc_and_compact_remove_erased_clear_data_from_the_file(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    with Store(LmdbEngine(str(place), durability="full")) as store:
        life = Lifecycles(store)
        session = life.create_session("s", user="anna")
        session.working.set("text", LONG)
        session.working.set("never", "CANARY-WORKING")
        session.checkpoint("x", ["text"])
        life.users.put("anna", "small", SMALL)
        life.users.put("anna", "long", [LONG])
        life.users.put("berta", "other", "KEPT " * 200)
        store.flush()
        assert {b"CANARY-SMALL" in raw_files(place), b"CANARY-LONG" in raw_files(place)} == {True}
        provider = LifecycleErasure()
        plan = erasure.plan(store, "anna", providers=[provider])
        assert erasure.execute(store, plan, providers=[provider]).records_erased == 3
        gc.collect(store, grace_ms=0)
    compact.compact(place)
    assert b"CANARY" not in raw_files(place)
    with Store(LmdbEngine(str(place), durability="full")) as store:
        assert Lifecycles(store).users.get("berta", "other") == "KEPT " * 200


def test_equal_encrypted_values_have_different_rows_and_objects(locked: Lifecycles) -> None:
    for user in ("anna", "berta"):
        for name in ("one", "two"):
            locked.users.put(user, name, LONG)
            locked.users.put(user, f"small {name}", SMALL)
    rows = [record.row for record in locked.tables.users.scan()]
    assert len(set(rows)) == len(rows) == 8
    objects = [info.digest for info in locked.store.engine.scan_objects(limit=1000)]
    before = len(objects)
    locked.users.put("berta", "three", LONG)
    added = len(locked.store.engine.scan_objects(limit=1000)) - before
    # As many as the first of them took: nothing is shared with an equal value.
    assert added == before // 4


def test_short_encrypted_values_are_padded_to_one_length(locked: Lifecycles) -> None:
    sizes = set()
    for value in ("", "x", "yes", "a text of forty letters, more or less so", 7, None):
        locked.users.put("anna", "x", value)
        [record] = locked.tables.users.scan()
        sizes.add(len(record.row))
    assert len(sizes) == 1


# --- what does not open -----------------------------------------------------------------------


def test_a_missing_key_is_distinguished_from_a_destroyed_one(
    locked: Lifecycles, keys: FileKeys, tmp_path: Path
) -> None:
    locked.users.put("anna", "x", SMALL)
    for other in (
        Lifecycles(locked.store),
        Lifecycles(locked.store, keys=FileKeys(tmp_path / "other keys")),
    ):
        with pytest.raises(KeyMissingError, match="key store"):
            other.users.get("anna", "x")
        # Nor is it written in clear beside what is encrypted.
        with pytest.raises(KeyMissingError):
            other.users.put("anna", "y", SMALL)
    [name] = names(tmp_path / "keys")
    keys.destroy(name.removesuffix(".key"))
    with pytest.raises(KeyDestroyedError, match="in backups too"):
        locked.users.get("anna", "x")
    with pytest.raises(KeyDestroyedError):
        locked.users.put("anna", "y", 1)
    assert locked.users.erase("anna").deleted == 1
    locked.users.put("anna", "y", 1)
    assert locked.users.get("anna", "y") == 1


def test_a_row_that_is_moved_does_not_open(locked: Lifecycles) -> None:
    locked.users.put_many(
        [NewValue("anna", "role", "user"), NewValue("anna", "nick", "admin"),
         NewValue("berta", "role", "admin")]
    )  # fmt: skip
    place = locked.tables.users.keys.key(locked.users.ref("anna", "role")[1:])
    for user, name in (("anna", "nick"), ("berta", "role")):
        record = locked.tables.users.find(locked.subjects.hash(user), name)
        assert record is not None
        locked.store.engine.write(Write(rows=[PutRow("records", place, record.row)]))
        with pytest.raises(CorruptionError, match="moved here from another user"):
            locked.users.get("anna", "role")


def test_every_changed_byte_is_noticed(keys: FileKeys) -> None:
    key = "aa.bb"
    keys.create(key)
    place = encryption.BoundTo(key, "user", "name")
    sealed = encryption.seal(keys, place, {"a": 1})
    assert encryption.open_sealed(keys, place, sealed) == {"a": 1}
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes((sealed[at] ^ 1,)) + sealed[at + 1 :]
        with pytest.raises(CorruptionError):
            encryption.open_sealed(keys, place, changed)
    for cut in (b"", sealed[:1], sealed[:13], sealed[:-1], None, "text"):
        with pytest.raises(CorruptionError):
            encryption.open_sealed(keys, place, cut)


def test_a_value_encrypted_by_an_earlier_release_can_be_decrypted(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path / "keys")
    (tmp_path / "keys" / "aa.bb.key").write_text("07" * 32 + "\n")
    (tmp_path / "keys" / "aa.bb.key").chmod(0o600)
    place = encryption.BoundTo("aa.bb", "aa", "name")
    assert encryption.open_sealed(keys, place, bytes.fromhex(GOLDEN)) == {"text": "golden", "n": 1}
    # And a name is hashed as it was.
    assert subject_hash(b"", b"anna").hex() == GOLDEN_ANNA
    assert subject_hash(b"secret", b"anna").hex() == GOLDEN_SECRET_ANNA


def test_a_value_that_cannot_be_encrypted_is_refused(
    locked: Lifecycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(locked.store.put_value([1]))
    with pytest.raises(InvalidValueError, match="link"):
        locked.users.put("anna", "x", {"to": link})
    monkeypatch.setattr(encryption, "MAX_VALUE_BYTES", 100)
    with pytest.raises(LimitError):
        locked.users.put("anna", "x", LONG)
    assert list(locked.users.names("anna")) == []


# --- which key is destroyed when ----------------------------------------------------------------


def test_erasing_a_user_destroys_the_user_key_though_held_records_stay(
    locked: Lifecycles, tmp_path: Path, clock: Clock
) -> None:
    life, folder = locked, tmp_path / "keys"
    life.users.put("anna", "free", 1)
    [users_key] = names(folder)
    life.users.put("anna", "held", "held", Annotation(hold=Hold("law", clock() + 100)))
    life.users.put("anna", "later", LONG)
    life.hold(life.users.ref("anna", "later"), Hold("law", clock() + 100))
    life.users.put("anna", "sealed", "sealed")
    life.seal(life.users.ref("anna", "sealed"), Seal("a", "b"))
    assert len(names(folder)) == 4
    report = life.users.erase("anna")
    assert (report.deleted, len(report.stayed), report.keys_destroyed) == (1, 3, 1)
    assert users_key not in names(folder)
    assert life.users.get("anna", "held") == "held"
    assert life.users.get("anna", "later") == LONG
    clock.move(100)
    report = life.users.erase("anna")
    assert (report.deleted, report.keys_destroyed, len(names(folder))) == (2, 2, 1)
    assert life.users.get("anna", "sealed") == "sealed"
    life.lift_seal(life.users.ref("anna", "sealed"), review="done")
    assert life.users.delete("anna", "sealed")
    assert names(folder) == []
    assert len(names(folder, ".destroyed")) == 4


def test_replacing_a_formerly_held_value_destroys_its_key(
    locked: Lifecycles, tmp_path: Path, clock: Clock
) -> None:
    locked.users.put("anna", "x", "old", Annotation(hold=Hold("law", clock() + 1)))
    [own] = names(tmp_path / "keys")
    clock.move(1)
    locked.users.put("anna", "x", "new")
    assert locked.users.get("anna", "x") == "new"
    assert own not in names(tmp_path / "keys")
    assert list(locked.tables.doomed.scan()) == []


def test_deleting_the_last_value_destroys_the_key(locked: Lifecycles, tmp_path: Path) -> None:
    for name in ("x", "y"):
        locked.users.put("anna", name, SMALL)
    locked.users.delete("anna", "x")
    assert len(names(tmp_path / "keys")) == 1
    locked.users.delete("anna", "y")
    assert names(tmp_path / "keys") == []
    locked.users.put("anna", "x", "again")
    assert locked.users.get("anna", "x") == "again"


class FailingKeys(FileKeys):
    """A key store that cannot destroy at the moment."""

    def destroy(self, name: str) -> bool:
        raise StorageError("no connection to the key store")


def test_keys_whose_destruction_failed_stay_pending(
    store: Store, keys: FileKeys, tmp_path: Path
) -> None:
    life = Lifecycles(store, keys=FailingKeys(tmp_path / "keys"))
    life.users.put("anna", "x", SMALL)
    with pytest.raises(StorageError, match="no connection"):
        life.users.erase("anna")
    assert list(life.users.names("anna")) == []
    assert len(names(tmp_path / "keys")) == 1
    # Neither without the key store nor with another one is the list forgotten.
    for others in (None, FileKeys(tmp_path / "other keys")):
        assert Lifecycles(store, keys=others).users.erase("anna").keys_waiting == 1
    assert Lifecycles(store, keys=keys).users.destroy_keys() == (1, 0)
    assert names(tmp_path / "keys") == []


def _deleted(life: Lifecycles, user: str) -> bool:
    return life.users.delete(user, "name")


def _removed(life: Lifecycles, user: str) -> bool:
    return life.remove(life.users.ref(user, "name")).there


@pytest.mark.parametrize("remove", [_deleted, _removed])
def test_pending_keys_are_not_read_when_data_is_removed_without_the_key_store(
    store: Store, locked: Lifecycles, remove: Callable[[Lifecycles, str], bool]
) -> None:
    # Once each removal read the list of all keys that waited, and left one more.
    def bytes_read(user: str) -> int:
        locked.users.put(user, "name", 1)
        counter = ReadCounter(store.engine)
        assert remove(Lifecycles(Store(cast(Engine, counter))), user)
        return counter.bytes_read

    first = bytes_read("anna")
    assert [bytes_read(f"user {n}") for n in range(8)] == [first] * 8
    assert locked.users.destroy_keys() == (9, 0)


def test_an_erasure_without_the_key_store_reports_the_pending_keys(
    locked: Lifecycles, keys: FileKeys, tmp_path: Path
) -> None:
    store = locked.store
    locked.users.put("anna", "x", SMALL)
    plan = erasure.plan(store, "anna", providers=[LifecycleErasure()])
    report = erasure.execute(store, plan, providers=[LifecycleErasure()])
    [waiting] = report.stays
    assert (report.records_erased, waiting.record) == (1, f"key {names(tmp_path / 'keys')[0][:-4]}")
    assert "was not given" in waiting.reason
    provider = LifecycleErasure(keys=keys)
    plan = erasure.plan(store, "anna", providers=[provider])
    assert [one.record for one in plan.stays] == [waiting.record]
    report = erasure.execute(store, plan, providers=[provider])
    assert (report.stays, names(tmp_path / "keys")) == ((), [])


def test_a_key_created_for_a_conflicting_write_is_destroyed(
    locked: Lifecycles, keys: FileKeys, tmp_path: Path
) -> None:
    from casstore.testing.session_fixtures import interrupted

    other = Lifecycles(
        interrupted(locked.store, before=lambda: locked.users.put("anna", "x", 1)),
        keys=keys,
    )
    other.users.put("anna", "y", 2)
    assert (locked.users.get("anna", "x"), locked.users.get("anna", "y")) == (1, 2)
    assert len(names(tmp_path / "keys")) == 1
    assert len(names(tmp_path / "keys", ".destroyed")) == 1


def test_a_refused_value_leaves_no_key(locked: Lifecycles, tmp_path: Path) -> None:
    nowhere = Annotation(hold=Hold("law", 2**42), sources=[Ref("record", "no", "where")])
    with pytest.raises(InvalidValueError):
        locked.users.put("anna", "x", object())
    with pytest.raises(RecordNotFoundError):
        locked.users.put("anna", "x", 1, nowhere)
    assert names(tmp_path / "keys") == []
    locked.users.put("anna", "x", 1)
    locked.users.erase("anna")
    assert names(tmp_path / "keys") == []


class Interrupted(FileKeys):
    """A key store on the way to which somebody else gets in between, once."""

    between: Callable[[], Any] | None = None

    def get(self, name: str) -> bytes:
        between, self.between = self.between, None
        if between is not None:
            between()
        return super().get(name)


def test_a_call_retries_if_its_key_is_destroyed_concurrently(
    locked: Lifecycles, tmp_path: Path
) -> None:
    keys = Interrupted(tmp_path / "keys")
    other = Lifecycles(locked.store, keys=keys)
    locked.users.put("anna", "x", 1)
    keys.between = lambda: locked.users.erase("anna")
    other.users.put("anna", "x", 2)
    assert locked.users.get("anna", "x") == 2
    keys.between = lambda: locked.users.erase("anna")
    assert other.users.get("anna", "x", "gone") == "gone"
    locked.users.put("anna", "x", 3)
    keys.between = lambda: locked.users.erase("anna")
    assert UserStore(store=locked.store, keys=keys).get("anna", "x", "gone") == "gone"
    locked.users.put("anna", "x", 3)
    keys.between = lambda: (locked.users.erase("anna"), locked.users.put("anna", "x", 4))
    assert other.users.get("anna", "x") == 4
    keys.between = lambda: locked.users.erase("anna")
    with pytest.raises(LookupError, match="of this user"):
        other.hold(other.users.ref("anna", "x"), Hold("law", 2**42))


# --- keys in files ----------------------------------------------------------------------------


def test_key_files_are_private_and_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    keys = FileKeys(folder)
    key = keys.create("ab.1")
    assert (len(key), keys.get("ab.1"), FileKeys(folder).get("ab.1")) == (32, key, key)
    assert keys.create("ab.2") != key
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConflictError, match="used once"):
        keys.create("ab.1")
    assert keys.get("ab.1") == key
    assert names(folder, ".part") == []


def test_a_destroyed_key_is_overwritten_and_its_name_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = FileKeys(tmp_path / "k")
    key = keys.create("a")
    # Another name for the same bytes shows what they became.
    os.link(tmp_path / "k" / "a.key", tmp_path / "seen")
    keys.destroy("a")
    assert key.hex().encode() not in (tmp_path / "seen").read_bytes()
    with pytest.raises(KeyDestroyedError):
        keys.get("a")
    with pytest.raises(KeyDestroyedError):
        keys.create("a")
    assert keys.destroy("a")
    # What never was here may be somewhere else, and is not called destroyed.
    assert not keys.destroy("unknown")
    with pytest.raises(KeyMissingError):
        keys.get("unknown")
    assert keys.create("unknown")


def test_two_processes_may_destroy_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, other = FileKeys(tmp_path / "k"), FileKeys(tmp_path / "k")
    for last in ("open", "unlink"):
        keys.create(f"a.{last}")
        real = getattr(Path, last)

        def late(path: Path, *given: Any, real: Any = real, last: str = last) -> Any:
            monkeypatch.undo()
            assert other.destroy(f"a.{last}")
            return real(path, *given)

        monkeypatch.setattr(Path, last, late)
        assert keys.destroy(f"a.{last}")
        with pytest.raises(KeyDestroyedError):
            keys.get(f"a.{last}")


def test_a_crash_at_any_step_of_destroying_leaves_a_key_whole_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CrashError(Exception):
        pass

    def crash_at(step: int) -> Callable[..., None]:
        done = [0]

        def sync(*_: Any) -> None:
            done[0] += 1
            if done[0] == step:
                raise CrashError

        return sync

    outcomes = set()
    for step in range(1, 7):
        keys = FileKeys(tmp_path / f"k{step}")
        key = keys.create("a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", crash_at(step))
            try:
                keys.destroy("a")
            except CrashError:
                outcomes.add("crashed")
            else:
                outcomes.add("done")
        try:
            assert keys.get("a") == key
        except KeyDestroyedError:
            outcomes.add("gone")
        else:
            outcomes.add("whole")
        keys.destroy("a")
        with pytest.raises(KeyDestroyedError):
            keys.get("a")
    assert outcomes == {"crashed", "done", "gone", "whole"}


def test_names_of_keys_cannot_leave_the_directory(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path / "k")
    for name in ("../a", "a/b", "", ".hidden", "A", "a" * 200, "a\0", "ä", "a\n", None):
        for call in (keys.create, keys.get, keys.destroy):
            with pytest.raises(InvalidInputError):
                call(name)  # type: ignore[arg-type]
    assert list((tmp_path / "k").iterdir()) == []


def test_keys_that_others_can_read_or_that_lie_in_the_store_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    keys = FileKeys(folder)
    keys.create("a")
    (folder / "a.key").chmod(0o640)
    with pytest.raises(StorageError, match="chmod go-rwx"):
        keys.get("a")
    folder.chmod(0o755)
    with pytest.raises(StorageError, match="chmod go-rwx"):
        FileKeys(folder)
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")):
        pass
    for inside in (tmp_path / "s" / "keys", tmp_path / "s"):
        with pytest.raises(InvalidInputError, match="inside the store"):
            FileKeys(inside)
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(InvalidInputError, match="inside the store"):
        FileKeys(tmp_path / "link" / "keys")


def test_a_damaged_key_file_is_neither_missing_nor_destroyed(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path / "k")
    for content in (b"", b"xyz", b"00" * 31, b"00" * 33, b"\xff" * 64):
        (tmp_path / "k" / "a.key").write_bytes(content)
        (tmp_path / "k" / "a.key").chmod(0o600)
        with pytest.raises(CorruptionError, match="holds no key"):
            keys.get("a")


MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cryptography":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from casstore.engine.memory import MemoryEngine
from casstore.records.lifecycles import FileKeys, Lifecycles
from casstore.store import Store
store = Store(MemoryEngine())
life = Lifecycles(store)
life.users.put("anna", "x", 1)
life.users.erase("anna")
print("clear works")
Lifecycles(store, keys=FileKeys(sys.argv[1]))
"""


def test_without_the_package_clear_data_works_and_keys_say_what_to_install(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", MISSING, str(tmp_path / "k")],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "clear works" in answer.stdout
    assert "pip install '.[sealing]'" in answer.stderr


def test_a_key_name_may_have_its_full_length(tmp_path: Path) -> None:
    """The name of the temporary file was checked as a key's, and was longer."""
    keys = FileKeys(tmp_path / "keys")
    name = "k" * 128
    assert keys.create(name) == keys.get(name)
