"""Space usage: charts of the overview, and the space that gc and retention would reclaim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from casstore.engine.protocol import Collecting, Measuring
from casstore.errors import CasstoreError
from casstore.format.digest import Kind
from casstore.maintenance import gc, retention
from casstore.maintenance import space as spaces
from casstore.maintenance.check import LastCheck, check, last_check, result_of
from casstore.maintenance.contents import Share, measure_contents, measure_sessions
from casstore.maintenance.policy import policy_fields
from casstore.ui.views.catalogue import SESSIONS, contents
from casstore.ui.views.viewed import Viewed, kind_name

_BIGGEST: Final = 25
# The own size is measured for this many sessions, the newest: one pass cannot measure more.
_MEASURED: Final = 62
_DAYS: Final = 60
_PLANS: Final = 100
_FINDINGS: Final = 10
# The most sessions for which the page plans retention.
_MAX_PLANNED: Final = 2_000
_DAY_S: Final = 86_400
# Passes over all objects are repeated at the earliest after this time.
_KEEP_S: Final = 5.0


class DayShown(NamedTuple):
    """The revisions and bytes added on one day that still exist."""

    day: str
    revisions: int
    size_bytes: int
    total_bytes: int
    #: The beginning of this day and of the next one shown, as fractions of the time shown.
    start: float = 0
    stop: float = 1


class KeptRow(NamedTuple):
    """Objects of one kind."""

    kind: str
    objects: int
    size_bytes: int


class BigShown(NamedTuple):
    """One of the largest objects."""

    digest: str
    kind: str
    size_bytes: int


class Charts(NamedTuple):
    """The size of a store, its sharing and its growth."""

    objects: int
    size_bytes: int
    #: The file on disk; None on an engine without one.
    file_bytes: int | None
    #: The size if every revision were a full copy.
    copies_bytes: float
    revisions: int
    kinds: tuple[KeptRow, ...]
    days: tuple[DayShown, ...]
    biggest: tuple[BigShown, ...]

    @property
    def sharing(self) -> float:
        """The size of all revisions, each written whole, divided by the size of all objects."""
        return self.copies_bytes / self.size_bytes if self.size_bytes else 1.0


class Health(NamedTuple):
    """The result of the last check."""

    last: LastCheck
    #: The worst findings, if this viewer has run the check.
    findings: tuple[str, ...] = ()


class Planned(NamedTuple):
    """What retention would remove of a session."""

    session: str
    policy: str
    is_deleted: bool
    reasons: tuple[str, ...]
    removed: int
    kept: int


class SpacePage(NamedTuple):
    """The space that can be reclaimed, and what each session keeps."""

    charts: Charts
    gc: gc.GcReport | None
    gc_problem: str
    shares: tuple[Share, ...]
    shares_omitted: int
    policy: str
    planned: tuple[Planned, ...]
    planned_sessions: int
    planned_revisions: int
    is_plan_cut: bool
    pack_bytes: int | None
    compact_bytes: int | None


def charts(viewed: Viewed) -> Charts:
    """Measure a store: one pass over the directory of its objects, remembered for a while."""
    return viewed.remembered("charts", lambda: _charts(viewed), keep_s=_KEEP_S)


def _charts(viewed: Viewed) -> Charts:
    found = measure_contents(viewed.store, listed=_BIGGEST)
    engine = viewed.store.engine
    file_bytes = None
    if isinstance(engine, Measuring):
        file_bytes = spaces.measure(viewed.store).file_bytes
    days: list[DayShown] = []
    total = 0
    for day in found.days:
        total += day.size_bytes
        days.append(DayShown(_date(day.day), day.revisions, day.size_bytes, total))
    days = days[-_DAYS:]
    # The size stays the same until the next day that adds something.
    begins = [day.day for day in found.days[-_DAYS:]]
    ends = [*begins[1:], begins[-1] + 1] if begins else []
    span = ends[-1] - begins[0] if begins else 1
    days = [
        day._replace(start=(begin - begins[0]) / span, stop=(end - begins[0]) / span)
        for day, begin, end in zip(days, begins, ends, strict=True)
    ]
    return Charts(
        found.objects,
        found.size_bytes,
        file_bytes,
        found.whole_copies_bytes,
        found.revisions,
        _kinds(found.by_kind),
        tuple(days),
        tuple([BigShown(one.digest.hex(), kind_name(one.kind), one.size_bytes)
               for one in found.biggest]),
    )  # fmt: skip


def _kinds(found: Mapping[int, tuple[int, int]]) -> tuple[KeptRow, ...]:
    """Objects by kind; a large blob and the lists of its parts are blobs."""
    summed: dict[str, KeptRow] = {}
    for kind, (objects, size_bytes) in found.items():
        name = "blob" if kind == Kind.CHUNKS else kind_name(kind)
        known = summed.get(name, KeptRow(name, 0, 0))
        summed[name] = KeptRow(name, known.objects + objects, known.size_bytes + size_bytes)
    return tuple(summed.values())


def _date(day: int) -> str:
    try:
        return datetime.fromtimestamp(day * _DAY_S, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return str(day)


def shares(viewed: Viewed) -> tuple[Sequence[Share], int]:
    """What each of the newest sessions reaches, and what it alone keeps; how many are left out."""
    return viewed.remembered("shares", lambda: _shares(viewed), keep_s=_KEEP_S)


def _shares(viewed: Viewed) -> tuple[Sequence[Share], int]:
    sessions = [one for one in contents(viewed).entries if one.kind == SESSIONS]
    newest = sorted(sessions, key=lambda one: -(one.changed_at_ms or 0))[:_MEASURED]
    found = measure_sessions(viewed.store, [one.id for one in newest])
    found.sort(key=lambda one: -one.own_bytes)
    return found, len(sessions) - len(newest)


def space(viewed: Viewed) -> SpacePage:
    """What gc and retention would remove; nothing is changed."""
    return viewed.remembered("space", lambda: _space(viewed), keep_s=_KEEP_S)


def _space(viewed: Viewed) -> SpacePage:
    store = viewed.store
    report: gc.GcReport | None = None
    problem = ""
    if isinstance(store.engine, Collecting):
        try:
            report = gc.plan(store).report
            if report.problem is not None:
                problem = str(report.problem)
        except CasstoreError as exc:
            problem = str(exc)
    pack_bytes = compact_bytes = None
    if isinstance(store.engine, Measuring):
        measured = spaces.measure(store)
        pack_bytes, compact_bytes = measured.reclaimable_by_pack, measured.reclaimable_by_compact
    known, omitted = shares(viewed)
    policy = retention.find_policy(store)
    planned, sessions, revisions, is_cut = _plan(viewed)
    return SpacePage(
        charts=charts(viewed),
        gc=report,
        gc_problem=problem,
        shares=tuple(known),
        shares_omitted=omitted,
        policy=_policy_text(policy),
        planned=planned,
        planned_sessions=sessions,
        planned_revisions=revisions,
        is_plan_cut=is_cut,
        pack_bytes=pack_bytes,
        compact_bytes=compact_bytes,
    )


def _plan(viewed: Viewed) -> tuple[tuple[Planned, ...], int, int, bool]:
    """What the stored policies would remove."""
    found: list[Planned] = []
    sessions = revisions = 0
    for seen, part in enumerate(retention.plan(viewed.store)):
        if seen >= _MAX_PLANNED:
            return tuple(found), sessions, revisions, True
        if not part.deleted and not part.removed:
            continue
        sessions += bool(part.deleted)
        revisions += len(part.removed)
        if len(found) < _PLANS:
            found.append(
                Planned(
                    part.session, _policy_text(part.policy), bool(part.deleted),
                    part.deleted or _reasons(part), len(part.removed), len(part.kept),
                )
            )  # fmt: skip
    return tuple(found), sessions, revisions, False


def _reasons(part: retention.SessionPlan) -> tuple[str, ...]:
    """Why revisions are kept, each reason with their number, the most frequent first."""
    found = Counter([reason.partition(" ")[0] for one in part.kept for reason in one.reasons])
    return tuple([f"{reason} {number}" for reason, number in found.most_common()])


def _policy_text(policy: retention.Policy | None) -> str:
    if policy is None:
        return ""
    return ", ".join([f"{name} {value}" for name, value in policy_fields(policy).items()])


def run_check(viewed: Viewed) -> Health:
    """Check the store now; the result is stored unless the store is open read-only."""
    report = check(viewed.store, max_findings=_FINDINGS)
    return Health(result_of(report), tuple([f"{one.code}: {one.what}" for one in report.findings]))


def health(viewed: Viewed, own: Health | None) -> Health | None:
    """The newest result of a check: ``own``, by this viewer, or the one stored in the store."""
    stored = last_check(viewed.store)
    if stored is None or (own is not None and own.last.checked_at_ms >= stored.checked_at_ms):
        return own
    return Health(stored)
