"""Actions on jobs: run now, move, edit the arguments, and remove; and the filters of jobs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kombu.utils.json import dumps

from kombu_couchdb.admin.jobs import OPEN, Removal, choose, complete, find, find_all
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.task_message import HIGHEST, arguments_in, headers_of
from kombu_couchdb.errors import CouchDBError, NotChangeable

from ..jobs import Jobs
from .change import Part
from .columns import json_line
from .fields import ARGS, QUEUE, SEEN, TASK, Field, Values, before, dates_in, new_arguments
from .fields import since as since_field
from .inputs import due_date, duration
from .selectable import MAX_COUNTED, MAX_NAME, ItemAction, Selectable


def wanted_jobs(jobs: Jobs, values: Values) -> JobFilter:
    """Return the filter that the values of the fields are; by default, all but dead and done jobs."""
    texts = {name: values.get(name) for name in ('queue', 'task', 'args')}
    since, until = dates_in(values, jobs.client.clock.now())
    return JobFilter(values.get('state') or OPEN, since=since, until=until, **texts)


def _matching(jobs: Jobs, values: Values) -> Iterator[str]:
    """Yield the ids of the documents of jobs, and of those that wait behind another one, the ids of their tasks."""
    seen = set[str]()
    for doc in listing(jobs.client, wanted_jobs(jobs, values), sys.maxsize):
        name = str(workitem.task_id(doc) if doc.get('behind') else doc['_id'])
        if name not in seen:  # a job that was moved is in a later part of the list
            seen.add(name)
            yield name


def _count(jobs: Jobs, values: Values, fully: bool) -> int | None:
    wanted = wanted_jobs(jobs, values)
    found = sum(1 for _ in listing(jobs.client, wanted, sys.maxsize if fully else MAX_COUNTED + 1))
    return found if found <= MAX_COUNTED or fully else None if wanted.needs_history else _of_queues(jobs, wanted)


def _of_queues(jobs: Jobs, wanted: JobFilter) -> int:
    queues: Mapping[str, Any] = status(jobs.client)['queues']
    return sum(queues[name][state] for name in queues for state in wanted.states if wanted.queue in (None, name))


def _find(jobs: Jobs, names: Sequence[str], exact: bool) -> Sequence[str]:
    if exact:
        return names
    found = find_all(jobs.client, names)
    full = (name if found[name] else choose(name, partial(complete, jobs.client, name)) or name for name in names)
    return [*dict.fromkeys(full)]


def _name_of(jobs: Jobs, name: str, arguments: bool) -> str:
    doc: Document = next(iter(find(jobs.client, name)), {})
    task, shown = workitem.task_name(doc), arguments_in(headers_of(doc)) if arguments else ''
    return f'{task}{shown}'[:MAX_NAME] if task else name


# -- actions


def _changed(what: str, part: Sequence[str], outcome: tuple[Collection[str], Mapping[str, CouchDBError]]) -> Part:
    done, refused = outcome
    return Part(len(part), {what: len(done)}, {name: str(error) for name, error in refused.items()})


def _run(jobs: Jobs, part: Sequence[str]) -> Iterator[Part]:
    yield _changed('is due now|are due now', part, jobs.move_all(part, eta=None))


def _move(
    jobs: Jobs, part: Sequence[str], *, to: str | None = None, due: Any = None, priority: int | None = None
) -> Iterator[Part]:
    moved, refused = jobs.move_all(part, queue=to, priority=priority, **(due or {}))
    yield _changed('moved', part, (moved, refused))._replace(queues={doc['queue'] for doc in moved.values()})


def _edit(
    jobs: Jobs, part: Sequence[str], *, new_args: Any = None, new_kwargs: Any = None, seen: str | None = None
) -> Iterator[Part]:
    yield _changed('edited', part, jobs.edit_all(part, args=new_args, kwargs=new_kwargs, rev=seen))


def _remove(jobs: Jobs, part: Sequence[str], *, terminate: bool = False, signal: str = 'SIGTERM') -> Iterator[Part]:
    done, refused = Counter[str](), dict[str, str]()
    for name, removal in jobs.remove_all(part, terminate=terminate, signal=signal).items():
        if reason := _kept(removal):
            refused[name] = reason
        else:
            done[_removed(removal, 'terminate' if terminate else 'revoke')] += 1
    yield Part(len(part), done, refused)


def _kept(removal: Removal) -> str:
    if removal.claimed or removal.removed:
        return ''
    if removal.dead:
        return 'it is a dead letter; see "failures drop"'
    return 'it is done: there is nothing to remove' if removal.done and not removal.revoked else ''


def _removed(removal: Removal, told: str) -> str:
    if removal.claimed:
        on = '' if told == 'terminate' else '; tasks that run go on'
        one = f'is held by a worker, which was told to {told} it{on}'
        return f'{one}|are held by workers, which were told to {told} them{on}'
    if removal.removed:
        return 'removed'
    return (
        f'is in no queue; the workers were told to {told} it, should one run it|'
        f'are in no queue; the workers were told to {told} them, should one run them'
    )


def _due(text: str) -> dict[str, Any]:
    try:
        return {'countdown': duration(text)}
    except ValueError:
        pass
    try:
        return {'eta': due_date(text)}
    except ValueError as exc:
        raise ValueError(f'{exc}; or a duration from now, such as 10m') from None


def _priority(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= HIGHEST):
        raise ValueError(f'it must be a whole number from 0 to {HIGHEST}, not {text!r:.80}')
    return int(text)


def _arguments(jobs: Jobs, name: str) -> Mapping[str, str]:
    """Return the arguments of a waiting job as JSON, and its revision; *raises* `NotChangeable`."""
    docs = [doc for doc in find(jobs.client, name) if workitem.is_waiting(doc)]
    if not docs:
        raise NotChangeable(f'the job {name} does not wait any more')
    try:
        args, kwargs, _ = jobs.decode(docs[0])
        dumps([args, kwargs])
    except (TypeError, ValueError) as exc:
        raise NotChangeable(f'the arguments of the job {name} cannot be edited here: {exc}') from None
    return {'new_args': json_line(args), 'new_kwargs': json_line(kwargs), SEEN.name: docs[0]['_rev']}


_ONLY_WAITING = 'Only a job that waits can be changed.'

JOBS: Selectable[Jobs, str] = Selectable(
    'job',
    find=_find,
    name_of=_name_of,
    client=lambda jobs: jobs.client,
    filters=(
        Field(
            'state',
            'States',
            hint='Only those in this state. Can be given several times. Default: all but dead and done.',
            kind='chips',
            options=('ready', 'scheduled', 'parked', 'prefetched', 'running', 'dead', 'done'),
            short='-s',
        ),
        QUEUE,
        TASK,
        since_field('was published, failed or finished'),
        before('was published, failed or finished'),
        ARGS,
    ),
    matching=_matching,
    count=_count,
    actions=(
        ItemAction('run', 'Run now', _run, 'Run {} now?', f'They are due at once. {_ONLY_WAITING}', asks=False),
        ItemAction(
            'move',
            'Move',
            _move,
            'Move {}?',
            f'What you leave out stays as it is. {_ONLY_WAITING}',
            fields=(
                Field('to', 'Queue', hint='Move to this queue, which must be declared.', metavar='QUEUE'),
                Field(
                    'due',
                    'Due',
                    hint='A duration from now, such as 10m; a date such as 2026-01-31T08:00+01:00; or "now".',
                    read=_due,
                    metavar='TIME',
                ),
                Field('priority', 'Priority', hint=f'0 to {HIGHEST}; {HIGHEST} is the highest.', read=_priority),
            ),
            needs='Give a queue, a due date or a priority',
        ),
        ItemAction(
            'edit',
            'Edit arguments',
            _edit,
            'Edit the arguments of {}?',
            f'What you leave out stays as it is. {_ONLY_WAITING}',
            fields=new_arguments(),
            needs='Give other arguments',
            filled=_arguments,
        ),
        ItemAction(
            'remove',
            'Remove',
            _remove,
            'Remove {}?',
            'Jobs that wait are deleted for good, and their results become REVOKED. Jobs that a worker holds are '
            'revoked: they do not start. Dead letters are kept.',
            fields=(
                Field('terminate', 'Terminate jobs that run', hint='Their processes are stopped.', kind='check'),
                Field('signal', 'Signal', 'SIGTERM', 'Sent to the processes of jobs that run.', metavar='NAME'),
            ),
            tone='bad',
        ),
    ),
)
