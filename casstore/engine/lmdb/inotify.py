"""A watch by inotify, for Linux.

In a module of its own, imported when somebody watches: a fork waits for whoever is importing a
module of ours, and not for those who import others (``forks``).
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
    """A watch by inotify. Waking it is the end of it: it sees no more changes."""

    def __init__(self, data_handle: int, check: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # IN_NONBLOCK and IN_CLOEXEC are defined to be these.
        handle = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if handle < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        # By descriptor: the path may be relative to a directory that was left since.
        path = b"/proc/self/fd/%d" % data_handle
        self._watch = self._libc.inotify_add_watch(handle, path, _IN_MODIFY | _IN_ATTRIB)
        if self._watch < 0:
            os.close(handle)
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        super().__init__(handle, check)

    def _signal(self) -> None:
        # The kernel confirms the removal with an event. A second removal is refused.
        self._libc.inotify_rm_watch(self._handle, self._watch)
