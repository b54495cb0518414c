"""Compression and decompression with zstd.

Each thread has its own compressor: the output of a shared one varies from run to run. zstandard
ignores ``max_output_size`` if a frame declares a size, so 16 KiB could inflate to half a gigabyte.
So the declared size is compared with the expected one before anything is inflated (P7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zstandard

from casstore.errors import CorruptionError

# Codecs of stored bytes.
CODEC_RAW: Final = 0
CODEC_ZSTD: Final = 1

HOT_LEVEL: Final = 3
# For packed slabs, which are rarely rewritten: their size is 5 % below that of level 9, and they
# inflate as fast. This level compresses about 10 MB a second on one core.
COLD_LEVEL: Final = 15

# Input is stored compressed only if that saves at least one byte in _MIN_SAVING: 5 %.
_MIN_SAVING: Final = 20
# Shorter input is stored raw: a frame has ten bytes of overhead.
_MIN_RAW_BYTES: Final = 48

NO_DICTIONARY: Final = 0

#: Returns the content of the dictionary with this number.
LoadDictionary = Callable[[int], bytes]


class Compressor:
    """Compresses with the current dictionary, and inflates with the dictionary the caller names."""

    def __init__(self, load_dictionary: LoadDictionary) -> None:
        self._load = load_dictionary
        self._dictionaries: dict[int, zstandard.ZstdCompressionDict] = {}
        # The dictionary for packing, prepared for COLD_LEVEL: zstd prepares one for one level.
        self._cold_dictionaries: dict[int, zstandard.ZstdCompressionDict] = {}
        self._local = threading.local()
        self._current = NO_DICTIONARY

    def use(self, number: int, content: bytes | None = None) -> None:
        """Compress with dictionary ``number`` from now on; loads it unless ``content`` is given."""
        if number != NO_DICTIONARY and number not in self._dictionaries:
            content = self._load(number) if content is None else content
            dictionary = zstandard.ZstdCompressionDict(content)
            # Prepare the dictionary once, not for every slab.
            dictionary.precompute_compress(level=HOT_LEVEL)
            self._dictionaries[number] = dictionary
        self._current = number

    def compress(self, raw: bytes) -> tuple[int, int, bytes]:
        """Codec, dictionary number and payload; CODEC_RAW if compressing saves too little."""
        if len(raw) < _MIN_RAW_BYTES:
            return CODEC_RAW, NO_DICTIONARY, raw
        number = self._current
        frame = self._compressor(number).compress(raw)
        if len(raw) - len(frame) < len(raw) // _MIN_SAVING:
            return CODEC_RAW, NO_DICTIONARY, raw
        return CODEC_ZSTD, number, frame

    def compress_hard(self, raw: bytes) -> tuple[int, int, bytes]:
        """Like ``compress``, at COLD_LEVEL: the payload is smaller, compressing slower."""
        number = self._current
        frame = self._cold_compressor(number).compress(raw)
        if len(raw) - len(frame) < len(raw) // _MIN_SAVING:
            return CODEC_RAW, NO_DICTIONARY, raw
        return CODEC_ZSTD, number, frame

    def inflate(self, codec: int, dictionary: int, payload: bytes, raw_bytes: int) -> bytes:
        """The content of a payload; CorruptionError unless it has exactly ``raw_bytes`` bytes."""
        if codec == CODEC_RAW:
            if len(payload) != raw_bytes:
                raise CorruptionError(
                    f"the stored content has {len(payload)} bytes instead of {raw_bytes}"
                )
            return payload
        try:
            claimed = zstandard.frame_content_size(payload)
            if claimed != raw_bytes:
                raise CorruptionError(
                    f"a compressed frame claims to hold {claimed} bytes instead of {raw_bytes}"
                )
            raw = self._decompressor(dictionary).decompress(payload, max_output_size=raw_bytes)
        except (zstandard.ZstdError, MemoryError) as exc:
            raise CorruptionError(f"a damaged zstd frame ({exc})") from exc
        if len(raw) != raw_bytes:
            raise CorruptionError(
                f"a compressed frame holds {len(raw)} bytes instead of {raw_bytes}"
            )
        return raw

    def _compressor(self, number: int) -> zstandard.ZstdCompressor:
        made: dict[int, zstandard.ZstdCompressor] | None = getattr(self._local, "down", None)
        if made is None:
            made = self._local.down = {}
        compressor = made.get(number)
        if compressor is None:
            # The frame needs no dictionary number: the slab header has it. (zstandard adds no
            # checksum by default; digests are stronger.)
            compressor = made[number] = zstandard.ZstdCompressor(
                level=HOT_LEVEL, dict_data=self._dictionary(number), write_dict_id=False
            )
        return compressor

    def _cold_compressor(self, number: int) -> zstandard.ZstdCompressor:
        # The compressor is created for each slab: compressing at this level takes far longer.
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
    """A frame without a dictionary, at COLD_LEVEL: for data that is written once."""
    return zstandard.ZstdCompressor(level=COLD_LEVEL).compress(raw)


def inflate_alone(frame: bytes, max_bytes: int) -> bytes:
    """The content of a frame of ``compress_alone``, ignoring bytes after the frame.

    CorruptionError if the frame is invalid or longer than ``max_bytes``.
    """
    try:
        claimed = zstandard.frame_content_size(frame)
        if not 0 <= claimed <= max_bytes:
            raise CorruptionError(
                f"a compressed frame claims to hold {claimed} bytes; the limit is {max_bytes}"
            )
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes)
    except (zstandard.ZstdError, MemoryError) as exc:
        raise CorruptionError(f"a damaged zstd frame ({exc})") from exc
    if len(raw) != claimed:
        raise CorruptionError(
            f"a compressed frame holds {len(raw)} bytes, but claims to hold {claimed}"
        )
    return raw


def cold_dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    """The dictionary with this content, prepared for COLD_LEVEL."""
    dictionary = zstandard.ZstdCompressionDict(content)
    dictionary.precompute_compress(level=COLD_LEVEL)
    return dictionary


class Trial(NamedTuple):
    """A trained dictionary, and what it saves on samples that were not used for training."""

    dictionary: bytes
    #: The samples' size as compressed today.
    before_bytes: int
    #: Their size with the dictionary.
    after_bytes: int

    @property
    def gain(self) -> float:
        """The fraction of ``before_bytes`` that the dictionary saves."""
        return 1 - self.after_bytes / self.before_bytes if self.before_bytes else 0.0


def train(
    samples: Sequence[bytes], size_bytes: int, compress: Callable[[bytes], tuple[int, int, bytes]]
) -> Trial | None:
    """Train a dictionary on three quarters of the samples, and measure it on the rest.

    ``compress`` is the current compression, to compare with. None if there are too few samples.
    """
    held_out = samples[::4]
    learned: list[bytes | bytearray | memoryview] = [
        sample for at, sample in enumerate(samples) if at % 4
    ]
    try:
        dictionary = zstandard.train_dictionary(size_bytes, learned, level=HOT_LEVEL)
    except zstandard.ZstdError:
        # zstd cannot train on too few or too uniform samples.
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
    """Train a dictionary on ``samples``, and measure it on complete ``slabs`` of other objects.

    ``compress`` is the current compression, to compare with. None if there are too few samples.
    """
    learned: list[bytes | bytearray | memoryview] = list(samples)
    try:
        # At HOT_LEVEL: the dictionary is as good, and training takes a fifteenth of the time.
        content = zstandard.train_dictionary(size_bytes, learned, level=HOT_LEVEL).as_bytes()
    except zstandard.ZstdError:
        # zstd cannot train on too few or too uniform samples.
        return None
    trained = zstandard.ZstdCompressor(
        level=COLD_LEVEL, dict_data=cold_dictionary(content), write_dict_id=False
    )
    return Trial(
        content,
        sum([len(compress(raw)[2]) for raw in slabs]),
        sum([len(trained.compress(raw)) for raw in slabs]),
    )
