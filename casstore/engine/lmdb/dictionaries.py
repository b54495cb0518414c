"""Trained zstd dictionaries: numbered, stored permanently, adopted only for a measured gain.

A writer that pauses after each commit makes short slabs, which alone give a compressor little to
learn from. A dictionary trained on the store's own content replaces that context. It takes memory
in every thread and must be stored as long as any slab names it, so it is adopted (used for new
slabs) only if it saves enough on samples that it was not trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import lmdb

from casstore.engine.compression import (
    NO_DICTIONARY,
    Trial,
    compress_alone,
    inflate_alone,
    train,
)
from casstore.engine.lmdb.translation import translate
from casstore.errors import CasstoreError, CorruptionError
from casstore.format.digest import plain_hash

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

# A dictionary is adopted only if it saves this fraction.
MIN_GAIN: Final = 0.10
# How many bytes of samples are used. More do not help: on real and on generated sessions, 8 MiB
# gave the same sizes.
SAMPLE_BYTES: Final = 2 << 20
SAMPLE_MAX_OBJECT_BYTES: Final = 32 << 10

# Only slabs that are shorter than this, as stored, count for trials. A longer one has context of
# its own: a dictionary saved nothing on full slabs, and 12 to 17% on slabs of one commit each.
SHORT_SLAB_BYTES: Final = 8 << 10
# A writer first tries a dictionary when its short slabs take this much, early because most sessions
# are short. The pause until the next trial is TRIAL_GROWTH times as long each time, because most
# later trials gain little.
FIRST_TRIAL_BYTES: Final = 1 << 17
TRIAL_GROWTH: Final = 4

_SIZE_BYTES: Final = 64 << 10
# The fewest samples to train on. zstd advises a hundred times the dictionary's length; a small part
# of that already helps, and whether it does is measured on other samples.
_MIN_SAMPLE_BYTES: Final = 4 * _SIZE_BYTES
# Numbers are stored in four bytes.
_NUMBER_DIGITS: Final = 9
_NEWEST: Final = b"current_dictionary"
_CHECKSUM_BYTES: Final = 8
# The limit on the length of a stored dictionary, because a damaged row may claim any (P7). It is
# far above that of any dictionary trained here.
_MAX_BYTES: Final = 1 << 20


class DictionaryReport(NamedTuple):
    """The result of training: the size of the samples that were not used for training."""

    samples: int
    #: Their size as compressed today; 0 if there were too few samples to train.
    before_bytes: int
    #: Their size with the new dictionary.
    after_bytes: int
    #: The number of the new dictionary if new slabs use it from now on.
    adopted: int | None


def try_dictionary(
    samples: list[bytes], compress: Callable[[bytes], tuple[int, int, bytes]]
) -> Trial | None:
    """Train on ``samples`` and compare with current compression; None if there are too few."""
    if sum(map(len, samples)) < _MIN_SAMPLE_BYTES:
        return None
    return train(samples, _SIZE_BYTES, compress)


class TrainingSchedule:
    """Trains dictionaries in a thread, when a writer has made enough short slabs since the last."""

    def __init__(self, train: Callable[[], DictionaryReport]) -> None:
        self._train = train
        self._tried_at_bytes = 0
        self._wait_bytes = FIRST_TRIAL_BYTES
        #: The next trial is due when the writer's short slabs take this much.
        self.due_bytes = FIRST_TRIAL_BYTES
        self._thread: threading.Thread | None = None

    def start(self, short_bytes: int) -> None:
        """Start a thread that tries to train a better dictionary: no caller waits for it."""
        self._tried_at_bytes = short_bytes
        self._wait_bytes *= TRIAL_GROWTH
        self.due_bytes = short_bytes + self._wait_bytes
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._try, name="casstore-train", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system allows no more threads, or the interpreter is shutting down. The commit
                # is done, so its caller must not get an error; no new dictionary is needed.
                return
            self._thread = thread

    def _try(self) -> None:
        try:
            if not self._train().before_bytes:
                # Too few samples, because most objects were long. Try again soon.
                self._wait_bytes = FIRST_TRIAL_BYTES
                self.due_bytes = self._tried_at_bytes + FIRST_TRIAL_BYTES
        except CasstoreError:
            # The store is closed, out of space or damaged. No new dictionary is needed, and the
            # next read or write of a caller raises the error.
            return

    def join(self) -> None:
        """Wait for a trial that is under way, unless this is its thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def open_dictionary(number: int, row: bytes | None, path: str) -> bytes:
    """The content of a dictionary that ``store_dictionary`` encoded; CorruptionError if damaged."""
    if row is None:
        raise CorruptionError(f"{path} is damaged: dictionary {number} is missing")
    try:
        content = inflate_alone(row[_CHECKSUM_BYTES:], _MAX_BYTES)
    except CorruptionError as exc:
        raise CorruptionError(f"dictionary {number} of {path} is damaged: {exc}") from exc
    if plain_hash(content, _CHECKSUM_BYTES) != row[:_CHECKSUM_BYTES]:
        raise CorruptionError(f"dictionary {number} of {path} is damaged")
    return content


def store_dictionary(content: bytes) -> bytes:
    """The stored form of a dictionary: two thirds of it are text, which compresses."""
    return plain_hash(content, _CHECKSUM_BYTES) + compress_alone(content)


def dictionary_key(number: int) -> bytes:
    """The key under which a dictionary is stored."""
    return number.to_bytes(4, "big")


class DictionaryShelf:
    """The dictionaries of one store, by number, each with a checksum."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def newest(self) -> int:
        """The number of the dictionary that new slabs should use."""
        with self._env.reading() as txn:
            row = txn.get(_NEWEST, db=self._env.meta)
            number = str(NO_DICTIONARY).encode() if row is None else bytes(row)
        if not number.isdigit() or len(number) > _NUMBER_DIGITS:
            raise CorruptionError(
                f"{self._env.path} is damaged: the number of its newest dictionary is {number!r}"
            )
        return int(number)

    def load(self, number: int) -> bytes:
        """One dictionary, checked."""
        env, key = self._env, dictionary_key(number)
        if not env.gate.is_inside:
            with env.reading_bytes() as reading:
                row = reading.get(key, db=env.dictionaries)
        else:
            # This thread is decoding a slab inside a read transaction, so it must not enter the
            # gate a second time, as ``reading_bytes`` would.
            try:
                with env.handle.begin() as txn:
                    row = txn.get(key, db=env.dictionaries)
            except lmdb.Error as exc:
                raise translate(exc, env.path) from exc
        return open_dictionary(number, row, env.path)

    def add(self, content: bytes) -> int:
        """Store a dictionary and make it the newest; returns its number."""
        env = self._env
        row = store_dictionary(content)
        with env.writing() as txn:
            with txn.cursor(db=env.dictionaries) as cursor:
                number = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1
            txn.put(dictionary_key(number), row, db=env.dictionaries)
            txn.put(_NEWEST, str(number).encode(), db=env.meta)
        return number
