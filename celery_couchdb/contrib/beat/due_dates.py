"""Decisions about due dates, without reading or writing anything.

Two rules make each due date be sent once:

1. A due date is sent only after it was stored in the entry's state as `due`. So all processes send the same one, even
   if their code or their clocks differ. (Of exact schedules, the dates that follow it are also sent, because all
   processes compute the same ones.)
2. The next `due` is stored only after the message was. Both are repeated until they succeed, and the message has a
   fixed id.

No decision takes longer if more dates were missed: they are computed, not counted one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from .entries import DISABLED, LEAST_GRACE_SECONDS, MALFORMED, Entry, ScheduleState, error_of, task_id_of
from .schedules import Asked, At, Rule


class Decision(NamedTuple):
    """What is done about the due dates of an entry that have come."""

    #: The due dates to send now.
    send: list[float]
    #: How many are left out, and the next due date to store.
    skipped: int
    due: float | None
    #: Why the next due date cannot be computed.
    error: str | None = None

    def first(self, count: int) -> Decision:
        """Return this decision for the first `count` of its due dates; the others stay due."""
        return self if count == len(self.send) else self._replace(send=self.send[:count], due=self.send[count])


def planned(
    entry: Entry, state: ScheduleState | None, blank: ScheduleState, now: float, earliest: float = 0.0
) -> ScheduleState:
    """Return the state of an entry whose schedule is new, or the same object if the schedule has not changed.

    Without a `state` it begins with `blank`. Nothing can have been written before the date `earliest`, so what an older
    `start` made due is past. After an edit no due date is in the past, unless the edit also set a later `start`.
    """
    if state is not None and state['plan'] == entry.plan and (entry.error is None or state['error'] == entry.error):
        return state
    anchor = now if entry.start is None else float(entry.start)
    fresh: ScheduleState = {**(state or blank), 'plan': entry.plan, 'due': None, 'error': entry.error}
    fresh['anchor'] = anchor
    if entry.rule is None or not entry.enabled:
        return fresh
    if state is None:
        after = max(anchor if anchor >= earliest else now, blank['anchor'])
    else:
        after = max(anchor, earliest if anchor > state['anchor'] else now)
    try:
        # What was sent is not sent again: CouchDB may have forgotten its id.
        fresh['due'] = _next(entry, anchor, max(after, fresh['last'] or 0.0)) if fresh['count'] < entry.times else None
    except Exception as exc:  # schedules in the code of the app may raise anything
        fresh['error'], fresh['plan'] = f'its next due date cannot be computed: {error_of(exc)}', MALFORMED
    return fresh


def decide(entry: Entry, state: ScheduleState, now: float, limit: int) -> Decision:
    """Return what to do about the due dates until `now`; at most `limit` are sent. The state must have a due date.

    Those of which the entry allows no more are left out.
    """
    left = max(0, entry.times - state['count'])
    decision = _decide(entry, state, now, min(limit, max(1, left)))
    if len(decision.send) < left:
        return decision
    return decision._replace(send=decision.send[:left], due=None)


def _decide(entry: Entry, state: ScheduleState, now: float, limit: int) -> Decision:
    """Do as `decide`, without regard to `times`.

    After an interruption of more than `grace` seconds, `missed` decides. What is left out is noted first. So only the
    date that the state then has as `due` is sent, at the next call.
    """
    due, rule, anchor = state['due'], entry.rule, state['anchor']
    assert due is not None
    assert rule is not None
    send = [due]
    try:
        is_late = now - due > max(entry.grace, LEAST_GRACE_SECONDS)
        if isinstance(rule, Asked):
            send = []
            # A class that is asked a moment late must not drift.
            moment = now if is_late else due
            is_due, seconds = rule.ask(due, state['last'] or anchor, moment)
            is_skipped = is_due and is_late and entry.missed == 'skip'
            sent, later = [due] if is_due and not is_skipped else [], moment + seconds
            return Decision(sent, int(is_skipped), later if later <= entry.until else None)
        if is_late:
            if (last := _latest(rule, anchor, due, min(now, entry.until))) > due:
                return Decision([], rule.count(due, last) - 1, last)
            if entry.missed == 'skip':
                return Decision([], 1, _next(entry, anchor, due))
        following = _next(entry, anchor, due)
        while rule.exact and following is not None and following <= now and len(send) < limit:
            send.append(following)
            following = _next(entry, anchor, following)
        return Decision(send, 0, following)
    except Exception as exc:  # schedules in the code of the app may raise anything
        return Decision(send[:1], 0, None, f'its next due date cannot be computed: {error_of(exc)}')


def _next(entry: Entry, anchor: float, after: float) -> float | None:
    assert entry.rule is not None
    found = entry.rule.next(anchor, after)
    return found if found is not None and found <= entry.until else None


def has_date(entry: Entry, now: float) -> bool:
    """Tell whether an entry that is written now will have a due date."""
    if entry.rule is None or not entry.enabled:
        return True  # nobody expects one
    anchor = now if entry.start is None else float(entry.start)
    try:
        return _next(entry, anchor, max(anchor, now)) is not None
    except Exception:  # what a schedule raises is noted when it is read
        return True


def done_since(entry: Entry, state: ScheduleState) -> float | None:
    """Return the date since which an entry is done: nothing will be sent any more. None if it may be."""
    if state['due'] is not None or state['plan'] != entry.plan or entry.plan in (DISABLED, MALFORMED):
        return None
    if state['count'] >= entry.times:
        return state['sent']
    ends = (state['sent'], entry.doc.get('until'), entry.rule.date if isinstance(entry.rule, At) else None)
    return max((end for end in ends if end is not None), default=None)


def _latest(rule: Rule, anchor: float, due: float, now: float) -> float:
    """Return the last due date until `now`; `due` is one."""
    found, end = due, now  # there is no date from `end` to `now`
    while (following := rule.next(anchor, found)) is not None and following <= now:
        found, middle = following, rule.between(following, end)
        later = rule.next(anchor, middle)
        if later is not None and later <= now:
            found = later
        else:
            end = middle
    return found


def noted(state: ScheduleState, decision: Decision, errors: dict[float, str], now: float) -> ScheduleState:
    """Return the state after the due dates of a decision were sent, except those in `errors`."""
    sent = [due for due in decision.send if due not in errors]
    fresh: ScheduleState = {
        **state,
        'due': decision.due,
        'count': state['count'] + len(sent),
        'skipped': state['skipped'] + decision.skipped + len(errors),
        'error': decision.error or next(reversed(errors.values()), None),
    }
    if decision.error:
        fresh['plan'] = MALFORMED
    if sent:
        fresh['last'], fresh['sent'], fresh['task_id'] = sent[-1], now, task_id_of(state, sent[-1])
    return fresh


def upcoming(entry: Entry, state: ScheduleState | None, now: float, count: int) -> list[float]:
    """Return the next due dates of an entry, for people; an empty list if nothing will be sent.

    If the leader has not read the entry yet, the first date is computed as if it read it now. *Raises* what a schedule
    in the code of the app raises.
    """
    if entry.rule is None or not entry.enabled or (state is not None and state['plan'] == MALFORMED):
        return []
    anchor = now if entry.start is None else float(entry.start)
    if state is not None and state['plan'] == entry.plan:
        due, anchor = state['due'], state['anchor']
    else:
        due = _next(entry, anchor, anchor if state is None else max(anchor, now))
    count = min(count, entry.times - (state['count'] if state else 0))
    found: list[float] = []
    while due is not None and len(found) < count:
        found.append(due)
        due = None if isinstance(entry.rule, Asked) else _next(entry, anchor, due)
    return found
