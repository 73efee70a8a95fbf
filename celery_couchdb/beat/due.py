"""Decisions about due dates, without reading or writing anything.

Two rules make each due date be sent once:

1. A due date is sent only after it was stored in the entry's state as `due`. So all processes send the same one, even
   if their code or their clocks differ. (Of exact schedules, the dates that follow it are also sent, because all
   processes compute the same ones.)
2. The next `due` is stored only after the message was. Both are repeated until they succeed, and the message has a
   fixed id.
"""

from __future__ import annotations

from typing import NamedTuple

from .entries import DISABLED, MALFORMED, Entry, ScheduleState, new_state, task_id_of

__all__ = ['Decision', 'decide', 'noted', 'planned', 'upcoming']

#: The most due dates that are counted after an interruption. If there are more, those in between are not counted.
_MAX_COUNTED = 20_000


class Decision(NamedTuple):
    """What is done about the due dates of an entry that have come."""

    #: The due dates to send now.
    send: list[float]
    #: How many are left out, and the next due date to store.
    skipped: int
    due: float | None


def planned(entry: Entry, state: ScheduleState | None, doc_id: str, rev: str | None, now: float) -> ScheduleState:
    """Return the state of an entry whose schedule is new, or the same object if the schedule has not changed.

    `state` is the stored state, if there is a valid one, with the id `doc_id` and the revision `rev`.
    """
    if state is not None and state['plan'] == entry.plan and (entry.error is None or state['error'] == entry.error):
        return state
    fresh: ScheduleState = {**(state or new_state(doc_id, rev)), 'plan': entry.plan, 'due': None, 'error': entry.error}
    if entry.rule is not None and entry.enabled:
        fresh['anchor'] = now if entry.start is None else float(entry.start)
        # What was sent before an entry was disabled or malformed is not sent again: CouchDB may have forgotten its id.
        goes_on = state is not None and state['plan'] in (DISABLED, MALFORMED)
        after = max(fresh['anchor'], fresh['last'] or 0.0) if goes_on else fresh['anchor']
        try:
            fresh['due'] = entry.rule.next(fresh['anchor'], after)
        except Exception as exc:  # schedules in the code of the app may raise anything
            fresh['error'] = f'its next due date cannot be computed: {exc!r:.300}'
    return fresh


def decide(entry: Entry, state: ScheduleState, now: float, limit: int) -> Decision:
    """Return what to do about the due dates until `now`; at most `limit` are sent. The state must have a due date.

    After an interruption of more than `grace` seconds, `missed` decides. What is left out is noted first. So only the
    date that the state then has as `due` is sent, at the next call.
    """
    due, rule, anchor = state['due'], entry.rule, state['anchor']
    assert due is not None
    assert rule is not None
    is_late = now - due > entry.grace
    if is_late and entry.missed != 'all':
        skipped, following = 0, rule.next(anchor, due)
        while following is not None and following <= now:
            if skipped == _MAX_COUNTED:
                return Decision([], skipped + 1, rule.next(anchor, now))
            skipped, due, following = skipped + 1, following, rule.next(anchor, following)
        if skipped:
            return Decision([], skipped, due)
        if entry.missed == 'skip':
            return Decision([], 1, following)
    dates = [due]
    following = rule.next(anchor, due)
    while rule.exact and following is not None and following <= now and len(dates) < limit:
        dates.append(following)
        following = rule.next(anchor, following)
    return Decision(dates, 0, following)


def noted(
    state: ScheduleState, decision: Decision, errors: dict[float, str], now: float, planning_error: str | None = None
) -> ScheduleState:
    """Return the state after the due dates of a decision were sent, except those in `errors`."""
    sent = [due for due in decision.send if due not in errors]
    fresh: ScheduleState = {
        **state,
        'due': decision.due,
        'count': state['count'] + len(sent),
        'skipped': state['skipped'] + decision.skipped + len(errors),
        'error': planning_error,
    }
    if sent:
        fresh['last'], fresh['sent'], fresh['task_id'] = sent[-1], now, task_id_of(state, sent[-1])
    if errors:
        fresh['error'] = next(reversed(errors.values()))
    return fresh


def upcoming(entry: Entry, state: ScheduleState | None, now: float, count: int) -> list[float]:
    """Return the next due dates of an entry, for people; an empty list if nothing will be sent.

    If the leader has not read the entry yet, the first date is computed as if it read it now.
    """
    if entry.rule is None or not entry.enabled:
        return []
    if state is None or state['plan'] != entry.plan:
        state = planned(entry, None, '', None, now)
    found: list[float] = []
    due = state['due']
    while due is not None and len(found) < count:
        found.append(due)
        due = entry.rule.next(state['anchor'], due)
    return found
