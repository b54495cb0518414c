"""zstd with its sharp edges covered: one door for compressing and inflating.

A compressor is kept per thread: one that threads share gives other output from run
to run. An inflated size is never believed: zstandard ignores ``max_output_size``
when the frame names a size of its own, so 16 KiB may inflate to half a gigabyte.
Both claims are compared before a byte is inflated (P7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zstandard

from casstore.errors import CorruptionError

# How bytes lie where they are stored.
CODEC_RAW: Final = 0
CODEC_ZSTD: Final = 1

HOT_LEVEL: Final = 3
# For slabs that are packed and stay so: a twentieth smaller than at level 9, and no slower
# to inflate. It takes a core one second for some ten megabytes, once in the life of a slab.
COLD_LEVEL: Final = 15

# Compression that saves less than one byte in twenty is not worth inflating later.
_MIN_SAVING: Final = 20
# Below this nothing is saved: a frame has ten bytes of its own.
_MIN_RAW_BYTES: Final = 48

NO_DICTIONARY: Final = 0

LoadDictionary = Callable[[int], bytes]


class Compressor:
    """Compresses slabs with the newest dictionary, inflates them with the one they name."""

    def __init__(self, load_dictionary: LoadDictionary) -> None:
        self._load = load_dictionary
        self._dictionaries: dict[int, zstandard.ZstdCompressionDict] = {}
        # The same for packing: a dictionary is digested for one level.
        self._cold_dictionaries: dict[int, zstandard.ZstdCompressionDict] = {}
        self._local = threading.local()
        self._current = NO_DICTIONARY

    def use(self, number: int, content: bytes | None = None) -> None:
        """Compress with this dictionary from now on; it is loaded here unless given."""
        if number != NO_DICTIONARY and number not in self._dictionaries:
            content = self._load(number) if content is None else content
            dictionary = zstandard.ZstdCompressionDict(content)
            # Else every slab would have it digested anew.
            dictionary.precompute_compress(level=HOT_LEVEL)
            self._dictionaries[number] = dictionary
        self._current = number

    def compress(self, raw: bytes) -> tuple[int, int, bytes]:
        """(codec, dictionary number, payload) for these bytes; raw if that is no longer."""
        if len(raw) < _MIN_RAW_BYTES:
            return CODEC_RAW, NO_DICTIONARY, raw
        number = self._current
        frame = self._compressor(number).compress(raw)
        if len(raw) - len(frame) < len(raw) // _MIN_SAVING:
            return CODEC_RAW, NO_DICTIONARY, raw
        return CODEC_ZSTD, number, frame

    def compress_hard(self, raw: bytes) -> tuple[int, int, bytes]:
        """The same for bytes that will stay as they are: more work."""
        number = self._current
        frame = self._cold_compressor(number).compress(raw)
        if len(raw) - len(frame) < len(raw) // _MIN_SAVING:
            return CODEC_RAW, NO_DICTIONARY, raw
        return CODEC_ZSTD, number, frame

    def inflate(self, codec: int, dictionary: int, payload: bytes, raw_bytes: int) -> bytes:
        """Exactly ``raw_bytes`` of content, or CorruptionError."""
        if codec == CODEC_RAW:
            if len(payload) != raw_bytes:
                raise CorruptionError(f"{len(payload)} bytes where {raw_bytes} were stored")
            return payload
        try:
            claimed = zstandard.frame_content_size(payload)
            if claimed != raw_bytes:
                raise CorruptionError(
                    f"a frame claims {claimed} bytes where {raw_bytes} were stored"
                )
            raw = self._decompressor(dictionary).decompress(payload, max_output_size=raw_bytes)
        except (zstandard.ZstdError, MemoryError) as exc:
            raise CorruptionError(f"a damaged zstd frame ({exc})") from exc
        if len(raw) != raw_bytes:
            raise CorruptionError(f"a frame of {len(raw)} bytes where {raw_bytes} were stored")
        return raw

    def _compressor(self, number: int) -> zstandard.ZstdCompressor:
        made: dict[int, zstandard.ZstdCompressor] | None = getattr(self._local, "down", None)
        if made is None:
            made = self._local.down = {}
        compressor = made.get(number)
        if compressor is None:
            # Frames are found through our own directory: no checksum (the digests are
            # better), no dictionary number (it stands in the slab's header).
            compressor = made[number] = zstandard.ZstdCompressor(
                level=HOT_LEVEL, dict_data=self._dictionary(number), write_dict_id=False
            )
        return compressor

    def _cold_compressor(self, number: int) -> zstandard.ZstdCompressor:
        # Made anew for each slab: at this level that costs nothing beside the work itself.
        dictionary = self._cold_dictionaries.get(number)
        if dictionary is None and number != NO_DICTIONARY:
            dictionary = cold_dictionary(self._load(number))
            self._cold_dictionaries = {number: dictionary}
        return zstandard.ZstdCompressor(level=COLD_LEVEL, dict_data=dictionary, write_dict_id=False)

    def _decompressor(self, number: int) -> zstandard.ZstdDecompressor:
        made: dict[int, zstandard.ZstdDecompressor] | None = getattr(self._local, "up", None)
        if made is None:
            made = self._local.up = {}
        decompressor = made.get(number)
        if decompressor is None:
            decompressor = made[number] = zstandard.ZstdDecompressor(
                dict_data=self._dictionary(number)
            )
        return decompressor

    def _dictionary(self, number: int) -> zstandard.ZstdCompressionDict | None:
        if number == NO_DICTIONARY:
            return None
        found = self._dictionaries.get(number)
        if found is None:
            found = self._dictionaries[number] = zstandard.ZstdCompressionDict(self._load(number))
        return found


def compress_alone(raw: bytes) -> bytes:
    """A frame that needs nothing else to be inflated; for what is written once."""
    return zstandard.ZstdCompressor(level=COLD_LEVEL).compress(raw)


def inflate_alone(frame: bytes, max_bytes: int) -> bytes:
    """What such a frame holds, whatever follows it; CorruptionError if it is none, or long."""
    try:
        claimed = zstandard.frame_content_size(frame)
        if not 0 <= claimed <= max_bytes:
            raise CorruptionError(f"a frame claims {claimed} bytes of at most {max_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes)
    except (zstandard.ZstdError, MemoryError) as exc:
        raise CorruptionError(f"a damaged zstd frame ({exc})") from exc
    if len(raw) != claimed:
        raise CorruptionError(f"a frame of {len(raw)} bytes that claims {claimed}")
    return raw


def cold_dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    """A dictionary made ready for packing."""
    dictionary = zstandard.ZstdCompressionDict(content)
    dictionary.precompute_compress(level=COLD_LEVEL)
    return dictionary


class Trial(NamedTuple):
    """A trained dictionary and what it saves on samples it has not seen."""

    dictionary: bytes
    before_bytes: int
    after_bytes: int

    @property
    def gain(self) -> float:
        """The part of today's size that the dictionary saves."""
        return 1 - self.after_bytes / self.before_bytes if self.before_bytes else 0.0


def train(
    samples: Sequence[bytes], size_bytes: int, compress: Callable[[bytes], tuple[int, int, bytes]]
) -> Trial | None:
    """Train on three of four samples, judge on the fourth against ``compress``, today's way.

    None if the samples do not suffice.
    """
    held_out = samples[::4]
    learned: list[bytes | bytearray | memoryview] = [
        sample for at, sample in enumerate(samples) if at % 4
    ]
    try:
        dictionary = zstandard.train_dictionary(size_bytes, learned, level=HOT_LEVEL)
    except zstandard.ZstdError:
        # zstd refuses to train on too few or too uniform samples; that is an answer.
        return None
    trained = zstandard.ZstdCompressor(level=HOT_LEVEL, dict_data=dictionary, write_dict_id=False)
    return Trial(
        dictionary.as_bytes(),
        sum([len(compress(sample)[2]) for sample in held_out]),
        sum([len(trained.compress(sample)) for sample in held_out]),
    )


def train_cold(
    samples: Sequence[bytes],
    slabs: Sequence[bytes],
    size_bytes: int,
    compress: Callable[[bytes], tuple[int, int, bytes]],
) -> Trial | None:
    """Train on ``samples``, judge on whole ``slabs`` of others against ``compress``.

    None if the samples do not suffice.
    """
    learned: list[bytes | bytearray | memoryview] = list(samples)
    try:
        # At the low level: what is learned is as good, in a fifteenth of the time.
        content = zstandard.train_dictionary(size_bytes, learned, level=HOT_LEVEL).as_bytes()
    except zstandard.ZstdError:
        # As above.
        return None
    trained = zstandard.ZstdCompressor(
        level=COLD_LEVEL, dict_data=cold_dictionary(content), write_dict_id=False
    )
    return Trial(
        content,
        sum([len(compress(raw)[2]) for raw in slabs]),
        sum([len(trained.compress(raw)) for raw in slabs]),
    )
