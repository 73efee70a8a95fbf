"""The actions on failures: retry, edit and retry, and drop, for selected failures or for all that match a filter.

A target is the id of a failure, or of the actions for all that match a filter, the filter as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kombu_couchdb.values import is_number

from ...failures import EVERY, Failure, FailureFilter, Failures
from ...resources.columns import json_line
from ...resources.failures import failure_resource
from ...resources.inputs import json_value
from ...resources.resource import counted
from ..actions import sentence
from ..view import Action, ActionOutcome, Field, InputRefused, View
from .jobs import known

#: For how long an action goes on, in seconds. It can be repeated for the rest.
_SECONDS = 20.0

#: How many failures are changed together.
_BATCH = 200

#: Up to this number, failures are read to count those that match.
_MAX_COUNTED = 1000

#: The maximum number of reasons why failures were not changed that are shown.
_MAX_REASONS = 5

_GONE = 'this failure is not there any more'

#: Changes some failures, and returns those that were changed, and why others were not, by id.
Change = Callable[[Failures, Sequence[Failure]], tuple[list[Failure], Mapping[str, str]]]


def failures_of(view: View) -> Failures:
    """Return the failures as the user of a view may see them."""
    return Failures(view.site.app, view.account.broker, view.account.results)


# -- filters as targets


def target_of(wanted: FailureFilter) -> str:
    """Return a filter as the target of an action for all that match."""
    return json.dumps({name: value for name, value in wanted._asdict().items() if value is not None})


def _wanted(target: str) -> FailureFilter:
    """Return the filter that a target is; *raises* `InputRefused`."""
    try:
        given = json.loads(target)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(map(_is_condition, given, given.values())):
        raise InputRefused('This form is not from this page: load it again')
    return FailureFilter(**given)


def _is_condition(name: str, value: Any) -> bool:
    if name in ('since', 'until'):
        return is_number(value)
    return name in FailureFilter._fields and isinstance(value, str)


def _described(view: View, targets: Sequence[str]) -> str:
    """Return in words which failures match filters, with their number."""
    failures, filters = failures_of(view), [_wanted(target)._replace(until=None) for target in targets]
    numbers = [failures.count(wanted, _MAX_COUNTED + 1) for wanted in filters]
    total = counted(sum(numbers), 'failure')
    if len(filters) > 1:
        return f'{counted(len(filters), "group")} with {total}'
    [wanted], is_part = filters, numbers[0] == _MAX_COUNTED + 1
    of = ''.join(
        f' {word} {value:.80}'
        for word, value in (('of', wanted.task), ('with', wanted.error), ('in the queue', wanted.queue))
        if value is not None
    )
    return f'{"all" if wanted == EVERY else "these"} {"more than 1,000 failures" if is_part else total}{of}'


# -- changes


def _changed(view: View, parts: Iterator[list[Failure]], verb: str, change: Change) -> ActionOutcome:
    """Change failures part by part, as long as there is time, and return what came of it."""
    failures, end = failures_of(view), time.monotonic() + _SECONDS
    count, reasons, is_cut = 0, dict[str, str](), False
    for part in parts:
        if is_cut := time.monotonic() > end:
            break
        done, refused = change(failures, part)
        count += len(done)
        reasons |= refused
    return _outcome(count, verb, reasons, is_cut)


def _outcome(count: int, verb: str, reasons: Mapping[str, str], is_cut: bool) -> ActionOutcome:
    texts = [f'{counted(count, "failure")} {verb}'] if count or not reasons else []
    texts += [f'{name}: {reason}' for name, reason in islice(reasons.items(), _MAX_REASONS)]
    if len(reasons) > _MAX_REASONS:
        texts.append(f'and {len(reasons) - _MAX_REASONS:,} more were not {verb}')
    if is_cut:
        texts.append(f'this stopped after {_SECONDS:.0f} s, and the rest is as it was: do it again to go on')
    tone = 'bad' if reasons else 'warning' if is_cut or not count else 'good'
    return ActionOutcome(sentence('; '.join(texts)), tone)  # type: ignore[arg-type]


def _selected(view: View, targets: Sequence[str], verb: str, change: Change) -> ActionOutcome:
    """Change the failures with these ids."""
    failures = failures_of(view)
    found = failures.named(targets)
    done, refused = change(failures, [failure for one in found.values() for failure in one])
    return _outcome(len(done), verb, {**{name: _GONE for name in found if not found[name]}, **refused}, False)


def _matching(view: View, targets: Sequence[str], verb: str, change: Change) -> ActionOutcome:
    """Change all failures that match these filters."""
    filters, failures = [_wanted(target) for target in targets], failures_of(view)
    return _changed(view, (part for wanted in filters for part in _parts(failures.listing(wanted))), verb, change)


def _parts(found: Iterator[Failure]) -> Iterator[list[Failure]]:
    while part := list(islice(found, _BATCH)):
        yield part


# -- the forms


def _queue(view: View) -> str | None:
    return view.form.get('queue', '').strip() or None


def _retry(act: Callable[..., ActionOutcome], view: View, targets: Sequence[str]) -> ActionOutcome:
    queue = _queue(view)
    return act(view, targets, 'retried', lambda failures, part: failures.retry(part, queue=queue))


def _drop(act: Callable[..., ActionOutcome], view: View, targets: Sequence[str]) -> ActionOutcome:
    return act(view, targets, 'dropped', Failures.drop)


def _queue_field(view: View, targets: Sequence[str]) -> Sequence[Field]:
    return (Field('queue', 'Queue', options=known(view)['queue'], hint='Empty: the queue that it was sent to.'),)


def _edit_fields(view: View, targets: Sequence[str]) -> Sequence[Field]:
    failures = failures_of(view)
    if not (found := failures.named(targets[:1])[targets[0]]):
        raise InputRefused(sentence(_GONE))
    [failure, *_] = failure_resource(failures, failures.now()).describe(found)
    if failure['unreadable']:
        raise InputRefused(f'The arguments cannot be edited here: {failure["unreadable"]}')
    texts = {name: '' if failure[name] is None else json_line(failure[name]) for name in ('args', 'kwargs')}
    return (
        Field('args', 'Arguments', texts['args'], 'A list in JSON.', kind='area'),
        Field('kwargs', 'Named arguments', texts['kwargs'], 'An object in JSON.', kind='area'),
        *_queue_field(view, targets),
    )


def _edit(view: View, targets: Sequence[str]) -> ActionOutcome:
    shown, given = {field.name: field.value for field in _edit_fields(view, targets)}, dict[str, Any]()
    for name, label, kind in (('args', 'Arguments', list), ('kwargs', 'Named arguments', dict)):
        text = view.form.get(name, '').strip()
        try:
            if text != shown[name]:
                given[name] = json_value(text, kind)
        except ValueError as exc:
            raise InputRefused(f'{label}: {exc}') from None
    queue = _queue(view)
    outcome = _selected(view, targets[:1], 'retried', lambda failures, part: failures.retry(part, queue=queue, **given))
    if outcome.tone == 'bad':
        raise InputRefused(outcome.text)
    return outcome


_RETRIED = (
    'The messages go back into their queues, and their tasks keep their ids. What follows a task in a chain or a chord '
    'runs after it.'
)
_DROPPED = 'The messages are deleted for good; results stay.'

#: The actions for failures with known ids.
ACTIONS = (
    Action('retry', 'Retry', partial(_retry, _selected), 'Retry {}?', _RETRIED, fields=_queue_field),
    Action(
        'edit-retry',
        'Edit and retry',
        _edit,
        'Edit and retry {}',
        _RETRIED,
        fields=_edit_fields,
        rows='one',
        is_offered=lambda view: not view.site.mask_args,
    ),
    Action('drop', 'Drop', partial(_drop, _selected), 'Drop {}?', _DROPPED, tone='bad'),
)

#: The actions for all failures that match a filter, such as that of a group.
FOR_ALL = (
    Action(
        'retry-all',
        'Retry all',
        partial(_retry, _matching),
        'Retry {}?',
        _RETRIED,
        fields=_queue_field,
        rows='match',
        describe=_described,
    ),
    Action(
        'drop-all',
        'Drop all',
        partial(_drop, _matching),
        'Drop {}?',
        _DROPPED,
        tone='bad',
        rows='match',
        describe=_described,
    ),
)
