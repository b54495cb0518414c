"""A watch on files by inotify, for Linux.

This module is separate so that it can be imported only when a watch is opened: it imports ctypes,
which is slow to load. A function must not import ctypes directly: a fork waits for a thread that is
importing one of casstore's modules, but not for other imports (``forks``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

from casstore.engine.watches import DescriptorWatch

_IN_MODIFY: Final = 0x2
_IN_ATTRIB: Final = 0x4


class InotifyWatch(DescriptorWatch):
    """Waits for changes of files by inotify.

    After ``wake``, which the engine calls when it closes, it reports no more changes of files.
    """

    def __init__(self, find_files: Callable[[], list[int]], check: Callable[[], None]) -> None:
        """``find_files`` returns the descriptors of the files to watch, later perhaps more.

        Raises OSError.
        """
        self._find_files = find_files
        # The number of the inotify watch of each descriptor.
        self._watched: dict[int, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        # inotify's flags IN_NONBLOCK and IN_CLOEXEC have the values of O_NONBLOCK and O_CLOEXEC.
        handle = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if handle < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        super().__init__(handle, check)
        try:
            self._watch_files()
        except OSError:
            self.close()
            raise

    def _watch_files(self) -> None:
        for number in self._find_files():
            if number not in self._watched:
                # By descriptor: the path may be relative to a working directory that has changed.
                path = b"/proc/self/fd/%d" % number
                watch = self._libc.inotify_add_watch(self._handle, path, _IN_MODIFY | _IN_ATTRIB)
                if watch < 0:
                    raise OSError(ctypes.get_errno(), "inotify_add_watch")
                self._watched[number] = watch

    def drain(self) -> None:
        """Mark all changes so far as seen, and watch files that ``find_files`` has added since."""
        super().drain()
        self._watch_files()

    def _signal(self) -> None:
        # The kernel sends an event for each removed watch, which makes the descriptor readable. A
        # second removal fails, without harm.
        for watch in self._watched.values():
            self._libc.inotify_rm_watch(self._handle, watch)
