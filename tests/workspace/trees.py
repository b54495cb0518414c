"""Directories to take snapshots of, and what is in one, byte for byte."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

#: kind, mode, and the content of a file or the target of a link
Found = dict[bytes, tuple[str, int, bytes]]

NAMES = [b"a", b"b.py", b"\xff\xfe", "ä".encode(), b" ", b"-rf", b"new\nline", b"%s", b"c" * 255]


def contents(root: Path, *, skip: tuple[bytes, ...] = ()) -> Found:
    """Everything below a directory by relative path; links are not followed."""
    found: Found = {}
    top = os.fsencode(root)
    for place, directories, files in os.walk(top):
        directories[:] = [
            name
            for name in directories
            if os.path.relpath(os.path.join(place, name), top) not in skip
        ]
        for name in directories + files:
            path = os.path.join(place, name)
            status = os.lstat(path)
            mode = status.st_mode & 0o777
            relative = os.path.relpath(path, top)
            if relative in skip:
                continue
            if stat.S_ISLNK(status.st_mode):
                found[relative] = "link", 0, os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                found[relative] = "directory", mode, b""
            else:
                with open(path, "rb") as file:
                    found[relative] = "file", mode, file.read()
    return found


def _directories(root: Path) -> list[bytes]:
    return [place for place, _, _ in os.walk(os.fsencode(root))]


def change(root: Path, chance: random.Random, steps: int) -> None:
    """Change a directory at random: files, links, directories, modes, kinds, names."""
    for _ in range(steps):
        place = chance.choice(_directories(root))
        path = os.path.join(place, chance.choice(NAMES))
        what = chance.randrange(9)
        exists = os.path.lexists(path)
        if what <= 3:
            if exists and (os.path.islink(path) or os.path.isdir(path)):
                _delete(path)
            size = chance.choice((0, 1, 3, 700, 5000, 70_000, 200_000))
            with open(path, "wb") as file:
                file.write(chance.randbytes(size) if chance.random() < 0.5 else b"x" * size)
            os.chmod(path, chance.choice((0o644, 0o755, 0o600, 0o444)))
        elif what == 4 and not exists:
            targets = (b"a", b"/etc/passwd", b"..", b"\xff", b"nowhere", b"t" * 900)
            os.symlink(chance.choice(targets), path)
        elif what == 5 and not exists:
            os.mkdir(path, chance.choice((0o755, 0o700)))
        elif what == 6 and exists:
            _delete(path)
        elif what == 7 and exists and not os.path.islink(path):
            os.chmod(path, 0o755 if os.path.isdir(path) else chance.choice((0o600, 0o755)))
        elif what == 8 and exists:
            target = os.path.join(chance.choice(_directories(root)), chance.choice(NAMES))
            if not os.path.lexists(target) and not target.startswith(path + b"/"):
                os.rename(path, target)


def _delete(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            _delete(os.path.join(path, name))
        os.rmdir(path)
    else:
        os.unlink(path)
