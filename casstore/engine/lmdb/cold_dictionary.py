"""A dictionary for packing, trained when there is enough to pack.

Large slabs have context of their own, so a dictionary saves less on them than on small slabs. But
this one is trained on all slabs to be packed, not only on the latest commits; it may be longer; and
packed slabs are rarely rewritten. It is measured on objects that it was not trained on, against
packing with the current dictionary, and must save twice its own length.
"""

from __future__ import annotations

from typing import Final

from casstore.engine.compression import Compressor, Trial, train_cold
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.reader import SlabCache, SlabReader

# With less to pack, the best dictionary could hardly save its own length.
MIN_RAW_BYTES: Final = 32 << 20
# A dictionary must save this fraction, and this many times its own length.
MIN_GAIN: Final = 0.03
_MIN_RETURN: Final = 2
_SIZE_BYTES: Final = 112 << 10
# The number of samples, evenly spread over the ids, each as long as a packed slab. Every fourth is
# held out: the dictionary is measured on those.
PLACES: Final = 32
_HELD_OUT: Final = 4
_MAX_SAMPLE_BYTES: Final = 32 << 10
# Slabs read in one transaction, so that none is open long.
_BATCH: Final = 1024


def try_cold_dictionary(
    env: Environment, compressor: Compressor, packed_to: int, newest: int
) -> Trial | None:
    """A dictionary for the slabs above ``packed_to``; None unless it saves enough."""
    raw_bytes = _raw_bytes(env, packed_to, newest)
    if raw_bytes < MIN_RAW_BYTES:
        return None
    samples: list[bytes] = []
    held_out: list[bytes] = []
    for number in range(PLACES):
        objects = _objects_at(
            env, compressor, packed_to + 1 + (newest - packed_to) * number // PLACES
        )
        if number % _HELD_OUT:
            samples += [data for data in objects if 0 < len(data) <= _MAX_SAMPLE_BYTES]
        else:
            held_out.append(b"".join(objects))
    trial = train_cold(samples, held_out, _SIZE_BYTES, compressor.compress_hard)
    if trial is None or trial.gain < MIN_GAIN:
        return None
    seen_bytes = sum(map(len, held_out))
    saved_bytes = (trial.before_bytes - trial.after_bytes) * raw_bytes / max(seen_bytes, 1)
    return trial if saved_bytes >= _MIN_RETURN * len(trial.dictionary) else None


def _raw_bytes(env: Environment, packed_to: int, newest: int) -> int:
    total = 0
    next_id = packed_to + 1
    while next_id <= newest:
        with env.reading() as txn:
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(next_id))
            for _ in range(_BATCH):
                if not more:
                    return total
                key, value = cursor.item()
                total += sum(slabs.read_directory(key, value, check=False).lengths)
                next_id = int.from_bytes(key, "big") + 1
                more = cursor.next()
    return total


def _objects_at(env: Environment, compressor: Compressor, object_id: int) -> list[bytes]:
    """The objects of the slabs from this id on, as many as fit into one packed slab."""
    objects: list[bytes] = []
    bytes_left = slabs.PACKED_RAW_BYTES
    with env.reading() as txn:
        reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor)
        cursor = txn.cursor(db=env.slabs)
        more = cursor.set_range(slabs.slab_key(object_id))
        while more and bytes_left > 0:
            slab = reader.decode_at(int.from_bytes(cursor.key(), "big"))
            for position in range(slab.directory.objects):
                objects.append(slab.stripped(position))
                bytes_left -= len(objects[-1])
            more = cursor.next()
    return objects
