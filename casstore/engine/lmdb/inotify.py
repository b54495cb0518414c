"""A watch by inotify, for Linux.

A separate module, imported when a watch is opened: a fork waits for a thread that imports one
of our modules, but not for imports of others (``forks``).
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
    """Waits for changes of files by inotify. After ``wake`` the watch reports no more changes."""

    def __init__(self, find_files: Callable[[], list[int]], check: Callable[[], None]) -> None:
        """``find_files`` returns the descriptors of the files to watch; more may come later."""
        self._find_files = find_files
        self._watched: dict[int, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        # IN_NONBLOCK and IN_CLOEXEC are defined to be these.
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
                # By descriptor: the path may be relative to an earlier working directory.
                path = b"/proc/self/fd/%d" % number
                watch = self._libc.inotify_add_watch(self._handle, path, _IN_MODIFY | _IN_ATTRIB)
                if watch < 0:
                    raise OSError(ctypes.get_errno(), "inotify_add_watch")
                self._watched[number] = watch

    def drain(self) -> None:
        """Consume all changes so far, and watch a log that has been created since."""
        super().drain()
        self._watch_files()

    def _signal(self) -> None:
        # The kernel confirms the removal with an event. A second removal is refused.
        for watch in self._watched.values():
            self._libc.inotify_rm_watch(self._handle, watch)
