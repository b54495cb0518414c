"""Operations on records while other writers and a collection run between any two of their calls.

What an operation has read may be replaced or removed before its next read, and gc may collect
what rows linked to. Then the operation sees the records as they are now, or raises that they are
gone. It reports no damage, and leaves none.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from casstore.engine.memory import MemoryEngine
from casstore.errors import CasstoreError, ConflictError, NotFoundError, ObjectNotFoundError
from casstore.maintenance import check, gc
from casstore.store import Store
from tests.session.test_interleaving import Interrupted

#: Long enough to be an object of its own, and another one.
LONG = "all of it " * 500
OTHER = "all of that " * 500

Operation = Callable[[Store], object]


def assert_unharmed(
    filled: MemoryEngine,
    operation: Operation,
    meanwhile: Operation,
    *,
    allowed: tuple[type[CasstoreError], ...] = (ConflictError, NotFoundError),
) -> None:
    """Run ``operation`` with ``meanwhile`` before its first engine call, its second, and so on.

    It may raise the errors in ``allowed``; none if everything that it needs exists throughout.
    """
    for at in count(1):
        engine = Interrupted(filled)
        happened: list[bool] = []

        def happens(engine: Interrupted = engine, happened: list[bool] = happened) -> None:
            happened.append(True)
            meanwhile(Store(engine))
            gc.collect(Store(engine), grace_ms=0)

        engine.happens, engine.calls_left = happens, at
        try:
            operation(Store(engine))
        except ObjectNotFoundError as exc:
            raise AssertionError(f"before call {at}: {exc}") from exc
        except allowed:
            assert happened
        if not happened:
            assert at > 1, "nothing was called"
            return
        engine.calls_left = -1
        report = check.check(Store(engine), level="full")
        assert report.sound, f"before call {at}: {report.findings}"
