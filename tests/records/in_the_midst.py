"""Operations on records, with others and a collection in the midst of them, between any two calls.

What an operation has read may be replaced or removed before it reads on, and what rows linked to
collected. Then it sees the records as they are now, or says that they are gone. It does not
tell of damage, and leaves none.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from casstore.engine.memory import MemoryEngine
from casstore.errors import CasstoreError, ConflictError, NotFoundError, ObjectNotFoundError
from casstore.maintenance import check, gc
from casstore.store import Store
from tests.session.test_in_the_midst import Interrupted

#: Long enough to be an object of its own, and another one.
LONG = "all of it " * 500
OTHER = "all of that " * 500

Operation = Callable[[Store], object]


def assert_unharmed(
    filled: MemoryEngine,
    operation: Operation,
    midst: Operation,
    *,
    told: tuple[type[CasstoreError], ...] = (ConflictError, NotFoundError),
) -> None:
    """Do something with something else before its first call, its second, and so on.

    It may say what was ``told``: give nothing if all that it needs is there throughout.
    """
    for at in count(1):
        engine = Interrupted(filled)
        happened: list[bool] = []

        def happens(engine: Interrupted = engine, happened: list[bool] = happened) -> None:
            happened.append(True)
            midst(Store(engine))
            gc.collect(Store(engine), grace_ms=0)

        engine.happens, engine.calls_left = happens, at
        try:
            operation(Store(engine))
        except ObjectNotFoundError as exc:
            raise AssertionError(f"before call {at}: {exc}") from exc
        except told:
            assert happened
        if not happened:
            assert at > 1, "nothing was called"
            return
        engine.calls_left = -1
        report = check.check(Store(engine), level="full")
        assert report.sound, f"before call {at}: {report.findings}"
