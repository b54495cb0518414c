"""Compares a store whose workers were killed with the journals of the workers.

    session_examiner.py    serves ``replay``'s protocol

For every session in a journal: its revisions are consecutive; each holds the result of the turns
before it; every acknowledged turn is in it and has its receipt; a turn with an unknown outcome is
there completely or not at all.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns import session_turns
from campaigns.replay import Violation, serve
from campaigns.session_journal import Call, read
from campaigns.session_story import NOTHING, Fate, Moment, Story
from campaigns.session_turns import SHARED
from campaigns.session_workload import MAX_TTL_MS
from casstore import Entry
from casstore.errors import CasstoreError
from casstore.maintenance.check import check as check_store
from casstore.maintenance.findings import ERROR
from casstore.session.session import Session

PLAIN, VERIFY = "plain", "verify"
# Every revision is loaded. For the newest, and as many others, every payload is compared too.
_READ_WHOLE = 12


def check(directory: Path, words: Sequence[str]) -> str:
    """Open the store and compare; returns ``name=number`` figures, or raises Violation."""
    journals, durability, mode = words
    try:
        with casstore.open(directory, durability, verify=mode == VERIFY) as store:
            figures = examine(store, Path(journals), whole=mode == VERIFY)
    except CasstoreError as exc:
        raise Violation(f"{type(exc).__name__}: {exc}") from exc
    return " ".join(f"{name}={number}" for name, number in figures.items())


def examine(store: casstore.Store, journals: Path, *, whole: bool) -> Mapping[str, int]:
    """Compare a store with journals; returns figures, or raises Violation."""
    examination = _Examination(store, Story(read(journals)))
    examination.sessions()
    if whole:
        examination.leases()
        examination.whole_store()
    return examination.figures


class _Examination:
    def __init__(self, store: casstore.Store, story: Story) -> None:
        self._store = store
        self._story = story
        self._forks: dict[str, list[Call]] = {}
        for call in story.of("fork"):
            self._forks.setdefault(call.asked["target"], []).append(call)
        # By session: the content of its revisions. A fork needs those of its source.
        self._moments: dict[str, dict[int, Moment]] = {}
        self._rng = random.Random(len(story.calls))
        self.figures: Counter[str] = Counter()

    def sessions(self) -> None:
        """Examine all sessions, and that there are no others."""
        names = [*SHARED, *self._forks]
        for name in names:
            self._session(name)
        there = {name for name in names if self._moments[name]}
        for info in self._store.sessions():
            if info.head is not None and info.meta.session not in there:
                raise Violation(f"list: no worker created the session {info.meta.session}")
            there.discard(info.meta.session)
        if there:
            raise Violation(f"list: sessions are not in it: {sorted(there)}")

    def whole_store(self) -> None:
        """Check the rest of the store."""
        report = check_store(self._store, level="full")
        for finding in report.findings:
            if finding.severity == ERROR:
                raise Violation(f"check: {finding}")

    def leases(self) -> None:
        """Leases of killed workers expire; the next fencing token is higher than all before."""
        for name in SHARED:
            session = self._store.session(name)
            deadline = time.monotonic() + 4 * MAX_TTL_MS / 1000
            while (lease := session.claim_lease("examiner", 1000)) is None:
                if time.monotonic() > deadline:
                    raise Violation(f"stuck: the lease of {name} does not run out")
                time.sleep(0.005)
            session.release_lease(lease)
            highest = max([call.answer or 0 for call in self._story.of("lease", name)], default=0)
            if lease.fencing <= highest:
                raise Violation(f"fencing: {lease.fencing} after {highest} on {name}")

    def _session(self, name: str) -> None:
        if name in self._moments:
            return
        session = self._store.session(name)
        history = list(session.history())[::-1]
        moments: dict[int, Moment] = {}
        self._moments[name] = moments
        before = NOTHING
        attempts: dict[int, Call] = {}
        for at, entry in enumerate(history):
            if entry.revision != history[0].revision + at:
                raise Violation(f"gap: {entry} follows {history[at - 1]}")
            if entry.operation == "commit":
                attempts[entry.revision] = attempt = self._attempt(session, entry)
                before = self._story.after(before, attempt)
            elif entry.operation == "rewind" and entry.rewound_to in moments:
                before = moments[entry.rewound_to]
            elif entry.operation == "fork" and at == 0:
                before = self._forked(session, entry)
            else:
                raise Violation(f"history: {entry} cannot be")
            moments[entry.revision] = before
        head = session.head()
        if (head and head.revision) != (history[-1].revision if history else None):
            raise Violation(f"history: of {name} does not end in {head}")
        origin = head and head.origin
        if history and history[0].revision != (origin.revision if origin else 1):
            raise Violation(f"gap: the history of {name} begins with {history[0]}")
        if not history and any(call.done or call.refused for call in self._forks.get(name, ())):
            raise Violation(f"lost: the fork {self._forks[name]}")
        self._load(session, history)
        self._turns(session, history)
        self._labels(session, history)
        self._queue(session, list(attempts.values()))
        self.figures["sessions"] += bool(history)
        self.figures["revisions"] += len(history)

    # --- the revisions ------------------------------------------------------------------------

    def _attempt(self, session: Session, entry: Entry) -> Call:
        """The attempt that made a commit of the history, by the last node of the commit."""
        fate = self._story.fates.get((session.id, entry.turn or ""))
        state = session.load(entry, hydrate=False)
        attempt = fate and state and fate.attempt_of(state.head.leaf)
        if attempt is None:
            raise Violation(f"unasked: {entry} ends in {state and state.leaf}, of {fate}")
        return attempt

    def _forked(self, session: Session, entry: Entry) -> Moment:
        """The initial content of a fork: that of its source at that revision."""
        head = session.head()
        calls = self._forks.get(session.id, ())
        origin = head and head.origin
        if origin is None or not calls or origin.session != calls[0].asked["source"]:
            raise Violation(f"fork: {head} was not asked for by {calls}")
        asked = calls[0].asked
        if origin.node != asked["node"] or asked["revision"] not in (None, origin.revision):
            raise Violation(f"fork: {head} is not what {calls} asked for")
        self._session(origin.session)
        moment = self._moments[origin.session].get(origin.revision)
        if moment is None or entry.revision != origin.revision:
            raise Violation(f"fork: {entry} comes from a revision that is not there: {origin}")
        if origin.node is not None:
            path = self._story.path_to(origin.node)
            moment = moment._replace(graph=path, path=path)
        else:
            found = self._store.compare((origin.session, origin.revision), (session.id, entry))
            if not found.equal:
                raise Violation(f"fork: {entry} differs from its source: {found}")
        told = [entry.revision, str(entry.manifest), moment.path[-1], len(moment.graph)]
        for call in calls:
            if call.done and call.answer != told:
                raise Violation(f"fork: {told} is there, and {call} was acknowledged")
        self.figures["forks"] += 1
        return moment

    def _load(self, session: Session, history: Sequence[Entry]) -> None:
        whole = {*history[-_READ_WHOLE:]}
        whole.update(self._rng.sample(history, min(_READ_WHOLE, len(history))))
        for entry in history:
            expected = self._moments[session.id][entry.revision]
            state = session.load(entry, hydrate=entry in whole)
            if state is None:
                raise Violation(f"load: {entry} is not there")
            if {(used.source, used.model): used for used in state.usage} != expected.usage:
                raise Violation(f"usage: {entry} has {state.usage}, not {expected.usage}")
            if state.head.node_count != len(expected.graph):
                raise Violation(f"graph: {entry} has {state.head}, not {len(expected.graph)} nodes")
            if entry not in whole:
                ids = [node.id for node in session.nodes(at=entry, payloads=False)]
                if ids != list(expected.path):
                    raise Violation(f"path: {entry} has {ids}, not {expected.path}")
                continue
            for scope, names in (("path", expected.path), ("full", expected.graph)):
                nodes = session.nodes("path" if scope == "path" else "full", at=entry)
                found = [(node.id, node.parent, node.payload) for node in nodes]
                if found != [(name, *self._story.made[name]) for name in names]:
                    raise Violation(f"{scope}: {entry} has {found}, not {names}")
            if expected.turn and state.checkpoint != session_turns.checkpoint(expected.turn):
                raise Violation(f"checkpoint: {entry} does not have that of {expected.turn}")

    # --- what belongs to a turn -----------------------------------------------------------------

    def _turns(self, session: Session, history: Sequence[Entry]) -> None:
        entries = {entry.turn: entry for entry in history if entry.turn is not None}
        times = Counter(entry.turn for entry in history if entry.turn is not None)
        for turn, number in times.items():
            if number > 1:
                raise Violation(f"done twice: turn {turn} is {number} times in {session.id}")
        for fate in self._story.fates_of(session.id):
            entry = entries.get(fate.turn.id)
            self._turn(session, fate, entry)
            cut = any(call.unknown for call in fate.calls)
            there = "there" if entry is not None else "not_there"
            self.figures[f"turns_{'cut_off' if cut else 'answered'},_{there}"] += 1

    def _turn(self, session: Session, fate: Fate, entry: Entry | None) -> None:
        acknowledged = fate.acknowledged
        if entry is None and acknowledged is not None:
            raise Violation(f"lost: {acknowledged}")
        if entry is not None and acknowledged is None and not fate.unknown:
            raise Violation(f"refused: and yet it is there: {entry}, {fate.calls[-1]}")
        if session.find_turn(fate.turn.id) is None:
            if entry is not None:
                raise Violation(f"receipt: none for {entry}, {fate.calls}")
        else:
            result = session.commit(fate.turn.commit(attempt=0))
            told = [result.revision, str(result.manifest), result.leaf, list(result.nodes)]
            if entry is None or not result.replayed or result.revision != entry.revision:
                raise Violation(f"receipt: {result} for {entry}, {fate.calls}")
            attempt = fate.attempt_of(result.leaf)
            names = attempt and fate.turn.node_ids(attempt.asked["attempt"])
            if names != list(result.nodes) or result.manifest != entry.manifest:
                raise Violation(f"receipt: {result} for {entry}, {attempt}")
            if acknowledged is not None and acknowledged.answer[:4] != told:
                raise Violation(f"receipt: {told} for {acknowledged}")
        for name in fate.turn.attachments:
            found = session.attachments.find(name)
            if found is None:
                raise Violation(f"lost: attachment {name} of {fate.calls[-1]}")
            stamp = None if entry is None else entry.committed_at_ms
            state = "intent" if entry is None else "committed"
            if (found.state, found.committed_at_ms) != (state, stamp):
                raise Violation(f"attachment: {found} of {entry}, {fate.calls}")

    def _labels(self, session: Session, history: Sequence[Entry]) -> None:
        there = {label: entry for entry in history for label in entry.labels}
        for fate in self._story.fates_of(session.id):
            if fate.turn.label is not None:
                entry = there.pop(fate.turn.label, None)
                turns = {entry.turn for entry in history}
                if (entry and entry.turn) != (fate.turn.id if fate.turn.id in turns else None):
                    raise Violation(f"label: on {entry}, of {fate.calls}")
        rewinds = {entry.revision: entry for entry in history if entry.operation == "rewind"}
        for call in self._story.of("rewind", session.id):
            entry = there.pop(call.asked["label"], None)
            if entry is None and call.done:
                raise Violation(f"lost: {call}")
            if entry is None:
                continue
            asked = call.asked["expected"] + 1, call.asked["to"]
            if call.refused or rewinds.pop(entry.revision, None) is None:
                raise Violation(f"rewind: {entry} was not asked for by {call}")
            if (entry.revision, entry.rewound_to) != asked:
                raise Violation(f"rewind: {entry} is not what {call} asked for")
            self.figures["rewinds"] += 1
        if rewinds:
            raise Violation(f"rewind: without its label: {rewinds}")
        marks: dict[str, set[int | None]] = {}
        for call in self._story.of("label", session.id):
            may_be = marks.setdefault(call.asked["label"], {None})
            if call.done:
                may_be.clear()
            if not call.refused:
                may_be.add(call.asked["revision"])
        for label, revisions in marks.items():
            entry = there.pop(label, None)
            if (entry and entry.revision) not in revisions:
                raise Violation(f"label: {label} is on {entry}, not on one of {revisions}")
        if there:
            raise Violation(f"label: no worker asked for {there}")

    def _queue(self, session: Session, attempts: Sequence[Call]) -> None:
        queued = {batch.id: batch for batch in session.queue.batches()}
        completed: dict[str, list[str]] = {}
        for attempt in attempts:
            for batch_id in attempt.asked["batches"]:
                completed.setdefault(batch_id, []).append(attempt.asked["turn"])
        sources = Counter(batch.source_key for batch in queued.values())
        if any(number > 1 for number in sources.values()):
            raise Violation(f"queue: a source key is in it twice: {sources}")
        asked: set[str] = set()
        for call in self._story.of("enqueue", session.id):
            asked.add(call.asked["batch"])
            if call.done and (call.answer in queued) + len(completed.get(call.answer, ())) != 1:
                raise Violation(
                    f"queue: {call} is {'' if call.answer in queued else 'not '}queued "
                    f"and completed by {completed.get(call.answer)}"
                )
        for batch_id, turns in completed.items():
            if len(turns) > 1 or batch_id in queued or batch_id not in asked:
                raise Violation(f"queue: {batch_id} was completed by {turns}; queued {queued}")
        for batch in queued.values():
            if batch.id not in asked or batch.items != session_turns.items(batch.source_key or ""):
                raise Violation(f"queue: no worker queued {batch}")
        self.figures["batches_queued"] += len(queued)
        self.figures["batches_completed"] += len(completed)


if __name__ == "__main__":
    serve(check)
