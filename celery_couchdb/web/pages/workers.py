"""The page of workers: who consumes what, since when there was no heartbeat, which tasks run, and remote control."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from starlette.responses import Response

from kombu_couchdb.values import enumerated

from ...remote_control import REPLY_SECONDS, RemoteControl, Reply
from ...resources.columns import NO_VALUE, Column, Row, Tone, count_cell, format_mean, rate_cell
from ...resources.fields import Field
from ...resources.workers import CONSUMERS, failed_cell, running_tasks, task_columns
from ..actions import sentence
from ..tables import Table
from ..view import Action, ActionOutcome, InputRefused, Page, View

#: The maximum number of running tasks that are shown, and of workers that an outcome names.
_LIMIT, _MAX_NAMED = 200, 5

_COLUMNS = [
    *(column for column in CONSUMERS if column.title != 'PID'),
    Column('PREFETCHED', 'prefetched', count_cell, right=True),
    Column('FAILED', 'tasks', failed_cell, right=True),
    Column('RATE/S', 'rate', rate_cell, right=True),
    Column('STARTED', 'pool', lambda pool: NO_VALUE),
]

#: A task runs longer than usual if it has run for so many times as long as it did on average in the last day.
_MANY_TIMES = 2
_NONE_LONG = f'No task has run for {_MANY_TIMES} times as long as it took on average in the last day.'

#: The pools whose number of processes can be changed while they run; '' for those that do not say what they are.
_RESIZABLE = ('prefork', 'gevent', 'eventlet', '')


def show(view: View) -> Response:
    """Show the consumers, and the tasks that they run."""
    found = view.snapshot()
    if view.wants_json:
        return view.json(found.status['consumers'])
    consumers = Table.of(
        'Workers',
        _COLUMNS,
        found.status['consumers'],
        _key,
        links={'WORKER': lambda row: view.link('/workers', worker=row['name'])},
        dates={'STARTED': lambda row: [row['pool']['since']] if row['pool'] else []},
        note=lambda row: ('', '') if row['alive'] else ('bad', 'overdue'),
        remark=lambda row: ', '.join(row['pool'].get('versions', ())),
        selectable=view.may_act,
        empty='No worker is running: start one with "celery -A your_app worker".',
    )
    name = view.param('worker')
    of_worker = f' of {name}' if name else ''
    running = [task for task in running_tasks(found.status) if name in ('', task['worker'])]
    mean = view.history().mean_seconds() if running else {}
    long = [task for task in running if found.date - task['since'] > _MANY_TIMES * mean.get(task['task'], inf)]
    is_long = view.param('running') == 'long'
    shown = long if is_long else running
    columns = task_columns(found.date)
    usual = Column('USUALLY', 'task', lambda task: format_mean(mean.get(task)), right=True)
    tasks = Table.of(
        'Running tasks',
        [*columns[:-1], usual, *columns[-1:]],
        shown[:_LIMIT],
        lambda task: f'{task["worker"]} {task["id"]}',
        links={
            **view.names(),
            'RUNNING TASK': view.names()['TASK'],
            'ID': lambda task: view.link(f'/tasks/{task["id"]}'),
        },
        empty=_NONE_LONG if is_long else f'No task{of_worker} has been running for more than a second.',
        more=f'These run for longest; there are {len(shown) - _LIMIT:,} more.' if len(shown) > _LIMIT else '',
    )
    choices = [
        (f'All {len(running):,}{of_worker}', view.link('/workers', worker=name), not is_long),
        (f'{len(long):,} longer than usual', view.link('/workers', worker=name, running='long'), is_long),
        *([('Clear', view.link('/workers'), False)] if name else []),
    ]
    return view.render('workers.html', consumers=consumers, tasks=tasks, choices=choices)


def _is_resizable(consumer: Row) -> bool:
    return _is_worker(consumer) and consumer['pool'].get('name', '') in _RESIZABLE


def _key(consumer: Row) -> str:
    """Return the node name of a Celery worker, by which it is told what to do; for others the id."""
    return str(consumer['name'] if _is_worker(consumer) else consumer['id'])


def _is_worker(consumer: Row) -> bool:
    return bool(consumer['alive']) and '@' in str(consumer['name'])


# -- actions

#: Tells the workers with these names something.
_Tell = Callable[[RemoteControl, View, Sequence[str]], Mapping[str, Reply]]


def _told(tell: _Tell) -> Callable[[View, Sequence[str]], ActionOutcome]:
    """Return the function of an action, which says who replied what, and who did not reply."""

    def function(view: View, targets: Sequence[str]) -> ActionOutcome:
        workers = {_key(one) for one in view.snapshot().status['consumers'] if _is_worker(one)}
        names, others = [name for name in targets if name in workers], [name for name in targets if name not in workers]
        said = defaultdict[Reply, list[str]](list)
        replies = tell(RemoteControl(view.site.app, view.account.broker), view, names) if names else {}
        for name in names:
            said[replies.get(name) or _SILENT].append(name)
        if others:
            said[_UNKNOWN] += others
        parts = [f'{reply.text}: {enumerated(some, _MAX_NAMED)}' for reply, some in said.items()]
        tone: Tone = 'bad' if any(reply.is_error for reply in said) else 'warning' if _SILENT in said else 'good'
        return ActionOutcome(sentence('; '.join(parts)), tone)

    return function


_SILENT = Reply(
    f'no reply within {REPLY_SECONDS:g} seconds (a solo pool replies when its task has ended; without remote control, '
    'a worker does not reply)'
)
_UNKNOWN = Reply('no Celery worker that runs', is_error=True)


def _resized(sign: int) -> _Tell:
    def tell(control: RemoteControl, view: View, names: Sequence[str]) -> Mapping[str, Reply]:
        given = view.form.get('processes', '').strip()
        if not (given.isascii() and given.isdecimal() and len(given) < 4 and int(given)):
            raise InputRefused(f'Give the number of processes, not {given!r:.40}')
        return control.resize(names, sign * int(given))

    return tell


def _queue(view: View) -> str:
    queue = view.form.get('queue', '').strip()
    if not queue:
        raise InputRefused('Give the name of a queue')
    return queue


_UNTIL_RESTART = 'Until it ends: after a restart, a worker consumes what its command line says.'


def _processes(view: View, targets: Sequence[str]) -> Sequence[Field]:
    """Return the field for a number; *raises* `InputRefused` if a pool has a fixed size."""
    workers = [one for one in view.snapshot().status['consumers'] if _key(one) in targets]
    if fixed := [f'{one["name"]} ({one["pool"]["name"]})' for one in workers if one['pool'] and not _is_resizable(one)]:
        raise InputRefused(f'The size of this pool is fixed: {enumerated(fixed, _MAX_NAMED)}')
    return (Field('processes', 'Processes', '1'),)


def _queues(view: View, targets: Sequence[str], *, consumed: bool) -> Sequence[Field]:
    """Return the field for a queue: one of those that these workers consume, or do not."""
    found = view.snapshot().status
    own = {name for one in found['consumers'] if _key(one) in targets for name in one['queues']}
    known = own if consumed else found['queues'].keys() - own
    return (Field('queue', 'Queue', options=sorted(known)),)


page = Page(
    '/workers',
    'Workers',
    show,
    noun='worker',
    actions=(
        Action(
            'add',
            'Add a queue',
            _told(lambda control, view, names: control.add_consumer(names, _queue(view))),
            'Let {} consume another queue?',
            _UNTIL_RESTART,
            fields=partial(_queues, consumed=False),
        ),
        Action(
            'cancel',
            'Stop consuming a queue',
            _told(lambda control, view, names: control.cancel_consumer(names, _queue(view))),
            'Let {} stop consuming a queue?',
            _UNTIL_RESTART,
            fields=partial(_queues, consumed=True),
        ),
        *(
            Action(
                title.lower(),
                title,
                _told(_resized(sign)),
                f'{title} the pool of {{}}?',
                fields=_processes,
                is_offered=lambda view: any(map(_is_resizable, view.snapshot().status['consumers'])),
            )
            for title, sign in (('Grow', 1), ('Shrink', -1))
        ),
        Action(
            'shutdown',
            'Shut down',
            _told(lambda control, view, names: control.shut_down(names)),
            'Shut down {}?',
            'Running tasks end first, and prefetched ones go to other workers. This page cannot start it again.',
            tone='bad',
        ),
    ),
)
