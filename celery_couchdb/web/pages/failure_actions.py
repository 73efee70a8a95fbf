"""The actions on failures: retry, edit and retry, and drop, for selected failures or for all that match a filter.

A target is the id of a failure, or of the actions for all that match a filter, the filter as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.values import is_number

from ...failures import EVERY, KINDS, Failure, FailureFilter, Failures
from ...resources.change import Change, Part
from ...resources.columns import json_line
from ...resources.failures import failure_resource
from ...resources.fields import Field
from ...resources.inputs import json_value
from ...resources.resource import counted
from ..view import Action, InputRefused, View

#: Up to this number, failures are read to count those that match.
_MAX_COUNTED = 1000

_GONE = 'this failure is not there any more'

#: Changes some failures, and returns those that were changed, and why others were not, by id.
Act = Callable[[Failures, Sequence[Failure]], tuple[list[Failure], Mapping[str, str]]]


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
    return name in FailureFilter._fields and isinstance(value, str) and (name != 'kind' or value in KINDS)


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


def _selected(view: View, targets: Sequence[str], verb: str, act: Act) -> Change:
    """Return the change of the failures with these ids, which are looked up together."""
    failures = failures_of(view)
    found = failures.named(targets)
    gone = {name: _GONE for name, some in found.items() if not some}
    items = [failure for some in found.values() for failure in some]
    change = _change(failures, len(targets), items, verb, act)
    return Change('failure', len(targets), chain([Part(len(gone), {}, gone)] if gone else [], change.run()))


def _matching(view: View, targets: Sequence[str], verb: str, act: Act) -> Change:
    """Return the change of all failures that match these filters."""
    filters, failures = [_wanted(target) for target in targets], failures_of(view)
    total = sum(failures.count(wanted._replace(until=None), _MAX_COUNTED + 1) for wanted in filters)
    found = chain.from_iterable(map(failures.listing, filters))
    return _change(failures, total if total <= _MAX_COUNTED or _is_whole(filters) else None, found, verb, act)


def _is_whole(filters: Sequence[FailureFilter]) -> bool:
    """Tell whether filters are groups, whose numbers are known."""
    return all((wanted.queue, wanted.since, wanted.args) == (None, None, None) for wanted in filters)


def _change(failures: Failures, total: int | None, items: Iterable[Failure], verb: str, act: Act) -> Change:
    def part_of(part: Sequence[Failure]) -> Iterator[Part]:
        done, refused = act(failures, part)
        yield Part(len(part), {verb: len(done)}, refused)

    return Change.of('failure', total, items, part_of)


# -- the forms


def _queue(view: View) -> str | None:
    return view.form.get('queue', '').strip() or None


def _retry(act: Callable[..., Change], view: View, targets: Sequence[str]) -> Change:
    queue = _queue(view)
    return act(view, targets, 'retried', lambda failures, part: failures.retry(part, queue=queue))


def _drop(act: Callable[..., Change], view: View, targets: Sequence[str]) -> Change:
    return act(view, targets, 'dropped', Failures.drop)


def _queue_field(view: View, targets: Sequence[str]) -> Sequence[Field]:
    return (Field('queue', 'Queue', options=view.known['queue'], hint='Empty: the queue that it was sent to.'),)


def _edit_fields(view: View, targets: Sequence[str]) -> Sequence[Field]:
    failures = failures_of(view)
    try:
        found = failures.named(targets[:1])[targets[0]]
        if not found:
            raise InputRefused(_GONE)
        [failure, *_] = failure_resource(failures, failures.now()).describe(found)
    except CouchDBError as exc:
        raise InputRefused(str(exc)) from None
    if failure['unreadable']:
        raise InputRefused(f'The arguments cannot be edited here: {failure["unreadable"]}')
    texts = {name: '' if failure[name] is None else json_line(failure[name]) for name in ('args', 'kwargs')}
    hint = '' if texts['args'] else ' They are not stored with the result: give them here.'
    return (
        Field('args', 'Arguments', texts['args'], f'A list in JSON.{hint}', kind='area'),
        Field('kwargs', 'Named arguments', texts['kwargs'], 'An object in JSON.', kind='area'),
        *_queue_field(view, targets),
    )


def _edit(view: View, targets: Sequence[str]) -> Change:
    shown, given = {field.name: field.value for field in _edit_fields(view, targets)}, dict[str, Any]()
    for name, label, kind in (('args', 'Arguments', list), ('kwargs', 'Named arguments', dict)):
        text = view.form.get(name, '').strip()
        try:
            if text != shown[name]:
                given[name] = json_value(text, kind)
        except ValueError as exc:
            raise InputRefused(f'{label}: {exc}') from None
    queue = _queue(view)
    return _selected(view, targets[:1], 'retried', lambda failures, part: failures.retry(part, queue=queue, **given))


_RETRIED = (
    'Failed tasks are sent again with their ids and arguments, and dead letters go back into their queues. What was to '
    'follow a failed task in a chain or a chord is not sent.'
)
_DROPPED = 'The failed results and the dead letters are deleted for good.'

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
        'Retry',
        partial(_retry, _matching),
        'Retry {}?',
        _RETRIED,
        fields=_queue_field,
        rows='match',
        describe=_described,
    ),
    Action(
        'drop-all',
        'Drop',
        partial(_drop, _matching),
        'Drop {}?',
        _DROPPED,
        tone='bad',
        rows='match',
        describe=_described,
    ),
)
