"""Actions on failures: retry, with other arguments if operators like, and drop; and the filters of failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..failures import Failure, FailureFilter, Failures
from .change import Part
from .columns import json_line
from .failures import failure_resource
from .fields import ARGS, QUEUE, SEEN, TASK, Field, Values, before, dates_in, new_arguments
from .fields import since as since_field
from .selectable import MAX_COUNTED, MAX_NAME, ItemAction, Selectable

#: Why a failure is not changed here that another place keeps.
_ELSEWHERE = 'it failed in another place: change or drop it there'


def wanted_failures(failures: Failures, values: Values) -> FailureFilter:
    """Return the filter that the values of the fields are."""
    since, until = dates_in(values, failures.now())
    queue, task, error, args = (values.get(name) for name in ('queue', 'task', 'error', 'args'))
    return FailureFilter(queue, task, error, since, until, args)


def _count(failures: Failures, values: Values, fully: bool) -> int | None:
    return failures.count(wanted_failures(failures, values), None if fully else MAX_COUNTED)


def _find(failures: Failures, names: Sequence[str], exact: bool) -> Sequence[Failure | str]:
    there = failures.named(names)
    if not exact:
        elsewhere = [name for name in names if not there[name] and failures.is_elsewhere(name)]
        return [*failures.find([name for name in names if name not in elsewhere]), *elsewhere]
    return [failure for name in names for failure in (there[name] or (name,))]


def _name_of(failures: Failures, failure: Failure | str, arguments: bool) -> str:
    if isinstance(failure, str):
        return failure
    return f'{failure.task}{failure.arguments if arguments else ""}'[:MAX_NAME] if failure.task else failure.id


def _changed(what: str, part: Sequence[Failure | str], done: int, refused: Mapping[str, str]) -> Part:
    """Return what came of some failures; those that are not there any more are ids."""
    gone = {failure: 'this failure is not there any more' for failure in part if isinstance(failure, str)}
    return Part(len(part), {what: done}, {**gone, **refused})


def _there(part: Sequence[Failure | str]) -> list[Failure]:
    return [failure for failure in part if not isinstance(failure, str)]


def _elsewhere(failures: Failures, part: Sequence[Failure | str]) -> list[str]:
    return [name for name in part if isinstance(name, str) and failures.is_elsewhere(name)]


def _retry(
    failures: Failures,
    part: Sequence[Failure | str],
    *,
    to: str | None = None,
    new_args: Any = None,
    new_kwargs: Any = None,
    seen: str | None = None,
) -> Iterator[Part]:
    there = _there(part)
    again = [failure for failure in there if seen not in (None, failure.letter['_rev'])]
    changed = {failure.id: 'it has failed again since you read it' for failure in again}
    same = [failure for failure in there if failure.id not in changed]
    done, refused = failures.retry(same, queue=to, args=new_args, kwargs=new_kwargs)
    elsewhere = _elsewhere(failures, part)
    if (to, new_args, new_kwargs) == (None, None, None):
        for name in elsewhere:
            failures.retry_elsewhere(name)
        yield Part(len(elsewhere), {'retried': len(elsewhere)}, {})
    else:
        changed |= dict.fromkeys(elsewhere, _ELSEWHERE)
    left = [failure for failure in part if failure not in elsewhere]
    queues = {queue for failure in done if (queue := to or failure.queue)}
    yield _changed('retried', left, len(done), {**changed, **refused})._replace(queues=queues)


def _drop(failures: Failures, part: Sequence[Failure | str]) -> Iterator[Part]:
    done, refused = failures.drop(_there(part))
    yield _changed('dropped', part, len(done), {**dict.fromkeys(_elsewhere(failures, part), _ELSEWHERE), **refused})


def _arguments(failures: Failures, failure: Failure | str) -> Mapping[str, str]:
    """Return the arguments of a failure as JSON, as far as they are known, and its revision."""
    if isinstance(failure, str):
        return {}
    [row, *_] = failure_resource(failures, failures.now()).describe([failure])
    texts = {f'new_{name}': json_line(row[name]) for name in ('args', 'kwargs') if row[name] is not None}
    return {**texts, SEEN.name: failure.letter['_rev']}


FAILURES: Selectable[Failures, Failure | str] = Selectable(
    'failure',
    find=_find,
    name_of=_name_of,
    client=lambda failures: failures.jobs.client,
    filters=(
        TASK,
        Field(
            'error',
            'Error',
            hint='Only this type of exception (ValueError) or other reason (rejected); or with a colon the beginning '
            'of the error ("ValueError: no such").',
        ),
        QUEUE,
        since_field('failed'),
        before('failed'),
        ARGS,
    ),
    matching=lambda failures, values: failures.listing(wanted_failures(failures, values)),
    count=_count,
    actions=(
        ItemAction(
            'retry',
            'Retry',
            _retry,
            'Retry {}?',
            'The messages go back into their queues, and their tasks keep their ids. What follows a task in a chain or '
            'a chord runs after it.',
            fields=(
                Field(
                    'to', 'Queue', hint='Send them to this queue. Default: the one they were sent to.', metavar='QUEUE'
                ),
                *new_arguments('Default: as they were.'),
            ),
            filled=_arguments,
        ),
        ItemAction(
            'drop',
            'Drop',
            _drop,
            'Drop {}?',
            'The messages are deleted for good; results stay.',
            tone='bad',
        ),
    ),
)
