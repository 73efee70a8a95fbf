"""Responses of any shape: callers get a valid value or a CouchDBError, and no other exception."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_couchdb.chords.counter import Chords
from celery_couchdb.options import ResultOptions as ResultOptions
from celery_couchdb.results.result_store import ResultStore as Results
from celery_couchdb.worker.expiry import sweep
from kombu_couchdb import design
from kombu_couchdb.admin import cluster, dead, jobs, queues, vacuum
from kombu_couchdb.admin import listing as history
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.admin.status import status
from kombu_couchdb.consumer.claims import CandidateReader
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.changes import Longpoll, read
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import Connections
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.fleet.candidates import QueueCandidates
from kombu_couchdb.leases.housekeeping import Janitor
from kombu_couchdb.leases.sweeper import Sweeper
from kombu_couchdb.queues.databases import BroadcastsDatabase, ensure
from kombu_couchdb.queues.fanout import Broadcaster, Listener
from kombu_couchdb.queues.store import Store
from kombu_couchdb.queues.topology import Topology

from .documents import WORKITEM
from .fake import HOST, Fake
from .strategies import json_values, retyped
from .test_messages import clear


def kinds(value: Any, *wanted: Any) -> bool:
    return isinstance(value, wanted)


def listing(value: Any, *wanted: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, wanted) for one in value)


CLIENT: dict[str, tuple[Callable[[Client], Any], Callable[[Any], bool]]] = {
    'get': (lambda c: c.get('x'), lambda doc: doc['_id'] == 'x' and kinds(doc['_rev'], str)),
    'leaves': (lambda c: c.leaves('x'), lambda docs: all(doc['_id'] == 'x' and doc['_rev'] for doc in docs)),
    'put': (lambda c: c.put({'_id': 'x'}), lambda rev: kinds(rev, str) and '-' in rev),
    'bulk': (
        lambda c: c.bulk([{'_id': 'x'}, {'_id': 'y'}]),
        lambda results: [one.id for one in results] == ['x', 'y'] and all(one.rev or one.error for one in results),
    ),
    'fetch': (
        lambda c: c.fetch(['dead', 'x', 'dead']),
        lambda docs: (
            len(docs) == 3
            and all(
                doc is None or doc['_id'] == wanted for doc, wanted in zip(docs, ['dead', 'x', 'dead'], strict=True)
            )
        ),
    ),
    'known': (lambda c: c.known(['x', 'y']), lambda ids: kinds(ids, set) and all(kinds(one, str) for one in ids)),
    'id_range': (lambda c: c.id_range('broker:'), lambda rows: all(row['id'] and row['value']['rev'] for row in rows)),
    'id_range, docs': (lambda c: c.id_range('broker:', docs=True), lambda rows: all(row['doc']['_id'] for row in rows)),
    'view': (lambda c: c.view('d', 'waiting', startkey=['q'], reduce=False), lambda rows: listing(rows, dict)),
    'view, docs': (
        lambda c: c.view('d', 'waiting', include_docs=True, limit=50, reduce=False),
        lambda rows: listing(rows, dict),
    ),
    'sequence': (lambda c: c.sequence(), lambda seq: kinds(seq, str, int)),
    'changes': (
        lambda c: read(c, 0, {}, 10),
        lambda answer: listing(answer['results'], dict) and answer['last_seq'] is not None,
    ),
    'longpoll': (lambda c: Longpoll(c).wait(0, 0, {}), lambda answer: listing(answer['results'], dict)),
    'welcome': (lambda c: c.welcome(), lambda greeting: kinds(greeting, dict)),
    'create': (lambda c: c.create(), lambda nothing: nothing is None),
    'delete': (lambda c: c.delete(), lambda nothing: nothing is None),
}


def declared(client: Client) -> Topology:
    topology = Topology(client)
    topology.declare_queue('limited', {'x-max-length': 5}, False)
    return topology


def matched(client: Client) -> Any:
    topology = Topology(client)
    direct, topic = topology.lookup('direct', 'a', {}), topology.lookup('topic', 'a.b', {}, recheck=False)
    assert direct is not None
    assert topic is not None
    return direct | topic


def heard(client: Client) -> Any:
    listener = Listener()
    listener.bind('fanout', 'q')
    docs = [row['doc'] for row in client.id_range('broker:broadcast:', docs=True)]
    return listener.take(docs)


def taken(client: Client) -> Any:
    window = QueueCandidates(client.clock, 'q', 100)
    candidates = CandidateReader(client)
    candidates.refill([window])
    return candidates.take_docs({'q': window}, {'q': 5})


def chords(client: Client) -> tuple[Results, Chords]:
    results = Results(client, ResultOptions(retry_policy={'max_retries': 0}))
    return results, Chords(results, 'chord-unlock-', 60.0, 30.0)


def set_up(client: Client) -> None:
    for step in plan(Wanted(client, design.documents(), ['somebody'], revisions=20)):
        if step.do:
            step.do()


#: Functions that send several requests.
HIGHER: dict[str, Callable[[Client], Any]] = {
    'ensure': lambda c: ensure(c, True),
    'each_ready': lambda c: list(Store(c).each_ready('q', [50])),
    'candidates': taken,
    'leases': lambda c: Store(c).leases(),
    'claims': lambda c: Store(c).release(Store(c).claims('broker:consumer:gone')),
    'settle a void claim': lambda c: Store(c).decide_unproven('claimed', '1-a', set()),
    'purge': lambda c: Store(c).purge('q'),
    'drop expired': lambda c: Store(c).drop_expired(),
    'sweep': lambda c: Sweeper(Store(c), Topology(c), 60.0).sweep('broker:consumer:own', set(), lambda: None),
    'clean up': lambda c: Janitor(c).clean_up(10),
    'declare': declared,
    'lookup': matched,
    'delete a queue': lambda c: Topology(c).delete_queue('limited'),
    'broadcast': lambda c: Broadcaster(BroadcastsDatabase(c), 60.0).send('fanout', '', WORKITEM['message']),
    'listen': heard,
    'status': lambda c: status(c, c),
    'dead letters': lambda c: dead.replay(c, list(dead.letters(c))),
    'selected dead letters': lambda c: dead.drop(
        c, list(dead.letters(c, dead.FailureFilter(task='add', error='rejected')))
    ),
    'groups of dead letters': lambda c: dead.groups(c),
    'queues': lambda c: [
        queues.names(c),
        queues.pause(c, 'q'),
        queues.resume(c, 'q'),
        sum(queues.deleting(c, 'limited')),
    ],
    'set up': set_up,
    'vacuum': lambda c: vacuum.vacuum(c, lambda step, done, total: None, age=0.0, wait=False),
    'jobs': lambda c: [
        jobs.find(c, 'task-1'),
        list(history.listing(c, history.JobFilter(jobs.STATES), 5)),
        jobs.state(c, 'task-1'),
    ],
    'read a result': lambda c: chords(c)[0].read_many(['celery-task-meta-t', 'x']),
    'write a result': lambda c: chords(c)[0].write({'_id': 'celery-task-meta-t', 'status': 'SUCCESS'}),
    'sweep results': lambda c: sweep(*chords(c), lambda: False),
    'count parts': lambda c: chords(c)[1].is_complete('g', ['chord-unlock-g:part:00000000:t']),
    'claim a chord': lambda c: chords(c)[1].claim('g', ordered=True),
    'unfinished chords': lambda c: list(chords(c)[1].unfinished(['chord-unlock-g', 'chord-unlock-claimed'])),
    'parts': lambda c: chords(c)[1].parts('g', ordered=False),
}


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """A function that repeats a call with malformed responses, and returns the numbers of successes and errors."""
    for module, limit in (
        (cluster, '_REPLICATION_SECONDS'),
        (cluster, '_BUSY_SECONDS'),
        (cluster, '_PAUSE_SECONDS'),
        (vacuum, '_IDLE_SECONDS'),
    ):
        monkeypatch.setattr(module, limit, 0.0)  # the simulated server never becomes ready

    def run(
        call: Callable[[Client], Any], right: Callable[[Any], bool], spoil: Callable[[Any, Any], Any]
    ) -> tuple[int, int]:
        ends, numbers = {True: 0, False: 0}, itertools.count()

        def once(told: Callable[[Any], Any]) -> None:
            fake = Fake(lambda path, answer: told(answer))
            monkeypatch.setattr(Connections, '_connected', fake.connected_to())
            # A new database for each example, because a process caches facts about databases.
            client = Client(Address(host=HOST, database=f'db{next(numbers)}', user='me', password='unguessable-77'))
            try:
                value = call(client)
            except CouchDBError as exc:
                clear(exc)
                ends[False] += 1
            else:
                assert right(value), value
                ends[True] += 1
            finally:
                client.close()

        @given(st.data())
        def often(data: Any) -> None:
            once(lambda answer: spoil(data, answer))

        once(lambda answer: answer)
        once(lambda answer: b'{')
        often()
        return ends[True], ends[False]

    return run


def reshaped(data: Any, answer: Any) -> Any:
    """Return the response mostly unchanged, sometimes with changed members, and sometimes another value."""
    how = data.draw(st.sampled_from(['right', 'right', 'spoilt', 'spoilt', 'other']))
    if how == 'other':
        return data.draw(_OTHERS)
    return data.draw(retyped({'answer': answer})).get('answer') if how == 'spoilt' and answer else answer


_OTHERS: st.SearchStrategy[Any] = json_values() | st.sampled_from(
    [[], {}, None, True, 0, '', {'rows': []}, {'rows': [{}]}, {'ok': True}, b'[' * 5000, b'{']
)


@pytest.mark.parametrize('name', CLIENT)
def test_client_returns_a_valid_response_or_raises(fuzz: Callable[..., tuple[int, int]], name: str) -> None:
    well, errors = fuzz(*CLIENT[name], reshaped)
    assert well
    assert errors or name in ('create', 'delete')


@pytest.mark.parametrize('name', HIGHER)
def test_functions_raise_only_documented_errors(fuzz: Callable[..., tuple[int, int]], name: str) -> None:
    well, errors = fuzz(HIGHER[name], lambda value: True, reshaped)
    assert well
    assert errors
