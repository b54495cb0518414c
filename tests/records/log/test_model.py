"""Random schedules against a plain list: what is reloaded is what was in memory."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.engine.memory import MemoryEngine
from casstore.maintenance import vacuum
from casstore.records.log import NewMessage, SessionLog
from casstore.store import Store

# Where folds begin and end is given as parts of a thousand of the history.
_PLACE = st.integers(0, 999)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("span"), _PLACE, _PLACE),
        st.tuples(st.just("set"), st.sets(_PLACE, min_size=1, max_size=6)),
        st.tuples(st.just("prune"), st.integers(0, 3)),
        st.tuples(st.just("vacuum")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("carry")),
    ),
    max_size=25,
)


class Model:
    """An agent's history in memory, and every message that ever came, as plain lists."""

    def __init__(self) -> None:
        self.history: list[tuple[int, str]] = []
        self.ever: dict[int, str] = {}
        self.notes = 0

    def append(self, text: str) -> None:
        number = len(self.ever) + 1
        self.ever[number] = text
        self.history.append((number, text))

    def chosen(self, step: Any) -> list[int]:
        """Which places of the history a fold takes."""
        size = len(self.history)
        if step[0] == "span":
            low, high = sorted(place * size // 1000 for place in step[1:])
            return list(range(low, high + 1))
        return sorted({place * size // 1000 for place in step[1]})

    def fold(self, places: list[int]) -> tuple[list[int], str]:
        """Replace messages by a note where the first was, and the old note with them."""
        with_note = [
            at
            for at, (_, text) in enumerate(self.history)
            if at in places or text.startswith("note")
        ]
        numbers = [self.history[at][0] for at in with_note]
        note = f"note {len(self.ever) + 1}"
        self.ever[len(self.ever) + 1] = note
        kept = [one for at, one in enumerate(self.history) if at not in with_note]
        kept.insert(with_note[0], (len(self.ever), note))
        self.history = kept
        return numbers, note


@settings(max_examples=100, deadline=None)
@given(_STEPS)
def test_a_reloaded_log_has_the_messages_of_the_model_in_the_same_order(steps: list[Any]) -> None:
    store = Store(MemoryEngine())
    log = SessionLog(store)
    log.create("s")
    session = "s"
    model = Model()
    pruned: set[int] = set()
    for step in steps:
        if step[0] == "append":
            for _ in range(step[1]):
                model.append(f"m{len(model.ever) + 1}")
                assert log.append(session, NewMessage("user", model.history[-1][1])) == len(
                    model.ever
                )
        elif step[0] in ("span", "set") and model.history:
            numbers, note = model.fold(model.chosen(step))
            fold = log.fold(session, numbers, note)
            assert fold.messages == sorted(numbers)
            assert fold.first <= fold.last
        elif step[0] == "prune":
            shown = {number for number, _ in model.history}
            folded = [each for each in model.ever if each not in shown and each not in pruned]
            going = folded[: max(0, len(folded) - step[1])]
            assert log.prune(session, keep_recent=step[1]) == len(going)
            pruned.update(going)
        elif step[0] == "vacuum":
            vacuum.vacuum(store, grace_ms=0)
        elif step[0] == "reopen":
            log = SessionLog(store)
        elif step[0] == "carry":
            session = log.import_session(list(log.export(session))).id
        reloaded = [(one.number, one.content) for one in log.active(session)]
        assert reloaded == model.history
        shown = {number for number, _ in model.history}
        assert [(one.number, one.content, one.state) for one in log.messages(session)] == [
            (number, text, "active" if number in shown else "compacted_out")
            for number, text in model.ever.items()
            if number not in pruned
        ]
        assert sum(one.name == "compact_note" for one in log.active(session)) <= 1
