"""Faces: an object of the store, its methods awaited, without a second list of their arguments.

    class AsyncThings(Face[Things]):
        put = awaited(Things.put)              # await things.put(…)
        items = iterated(Things.items)         # async for item in things.items(…)
        part = made(Things.part, AsyncPart)    # things.part(…).put(…), nothing to wait for
        open = opened(Things.open, AsyncPart)  # (await things.open(…)).put(…)

Arguments, results and what is said of them are those of the method itself, for readers and
for type checkers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from casstore.aio.threads import Run, iterate

Behind = TypeVar("Behind")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Shown = TypeVar("Shown")


class Face(Generic[Behind]):
    """What stands before an object whose calls take a while.

    A call that is cancelled while it writes cannot take the write back: its thread goes
    on, and what it does is done or not as if nobody had cancelled.
    """

    def __init__(self, run: Run, behind: Behind) -> None:
        self._run = run
        #: The object itself, for calls from threads.
        self.sync = behind


class _Method(Generic[Parameters, Shown]):
    """A method of a face, as it shows when it is looked up there."""

    def __init__(
        self, method: Callable[..., Any], show: Callable[[Face[Any], Callable[..., Any]], Any]
    ) -> None:
        self._show = show
        # What it says and takes, for readers.
        self.__doc__ = method.__doc__
        self.__wrapped__ = method

    @overload
    def __get__(self, face: None, kind: type) -> Self: ...
    @overload
    def __get__(self, face: Face[Any], kind: type) -> Callable[Parameters, Shown]: ...
    def __get__(self, face: Face[Any] | None, kind: type) -> Self | Callable[Parameters, Shown]:
        if face is None:
            return self
        shown: Callable[Parameters, Shown] = self._show(face, partial(self.__wrapped__, face.sync))
        return shown


def awaited(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> _Method[Parameters, Coroutine[Any, Any, Result]]:
    """The method, in a thread, awaited."""

    def show(face: Face[Any], call: Callable[..., Result]) -> object:
        return partial(face._run, call)

    return _Method(method, show)


def iterated(
    method: Callable[Concatenate[Any, Parameters], Iterator[Result]],
) -> _Method[Parameters, AsyncIterator[Result]]:
    """The method that gives an iterator, which fetches in a thread, some items at a time."""

    def show(face: Face[Any], call: Callable[..., Iterator[Result]]) -> object:
        def begin(*given: Any, **named: Any) -> AsyncIterator[Result]:
            return iterate(face._run, partial(call, *given, **named))

        return begin

    return _Method(method, show)


def opened(
    method: Callable[Concatenate[Any, Parameters], Result], face_of: Callable[[Run, Result], Shown]
) -> _Method[Parameters, Coroutine[Any, Any, Shown]]:
    """The method that reads and gives an object, awaited; the object has a face, too."""

    def show(face: Face[Any], call: Callable[..., Result]) -> object:
        async def begin(*given: Any, **named: Any) -> Shown:
            return face_of(face._run, await face._run(partial(call, *given, **named)))

        return begin

    return _Method(method, show)


def made(
    method: Callable[Concatenate[Any, Parameters], Result], face_of: Callable[[Run, Result], Shown]
) -> _Method[Parameters, Shown]:
    """The method that gives an object and reads nothing, called at once."""

    def show(face: Face[Any], call: Callable[..., Result]) -> object:
        def begin(*given: Any, **named: Any) -> Shown:
            return face_of(face._run, call(*given, **named))

        return begin

    return _Method(method, show)
