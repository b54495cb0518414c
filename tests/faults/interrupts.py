"""An interrupt (Ctrl-C) at a chosen moment of a chosen thread.

Python runs signal handlers at few places: after a call, at the beginning of a function and after a
jump backwards, but not where a loop's last condition ends it. ``Interrupt`` counts these places in
the modules it is given and raises KeyboardInterrupt at one of them, so that a test can try each of
them in turn.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType, ModuleType
from typing import Any

_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME")
_HANDLERS = ("PUSH_EXC_INFO", "WITH_EXCEPT_START")


class Interrupt:
    """Raises KeyboardInterrupt at the place number ``step``, and at ``again`` places after it."""

    def __init__(self, step: int, *modules: ModuleType, again: int | None = None) -> None:
        self._left = step
        self._again = again
        self._files = {module.__file__ for module in modules}
        # The instruction that each frame ran last: its name and position.
        self._before: dict[FrameType, tuple[str, int]] = {}
        #: How many interrupts there were.
        self.came = 0

    def arm(self) -> None:
        """Begin to count in this thread; also in the functions that have called this one."""
        frame = sys._getframe(1)
        sys.settrace(self._trace)
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_filename in self._files:
                caller.f_trace = self._trace_frame
                caller.f_trace_opcodes = True
                caller.f_trace_lines = False
                self._before[caller] = "CALL", caller.f_lasti
            caller = caller.f_back

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._trace_frame

    def _trace_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        if event != "opcode":
            return self._trace_frame
        before, position = self._before.get(frame, ("", 0))
        code = frame.f_code.co_code
        name = dis.opname[code[frame.f_lasti]]
        self._before[frame] = name, frame.f_lasti
        jumped_back = "JUMP_BACKWARD" in before and frame.f_lasti < position
        if name in _HANDLERS or not (before in _CALLS or jumped_back):
            return self._trace_frame
        if self._left == 0:
            self.came += 1
            self._left = -1 if self._again is None else self._again
            self._again = None
            raise KeyboardInterrupt
        self._left -= 1
        return self._trace_frame
