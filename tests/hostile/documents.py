"""A valid document of each type that the packages store, from which tests make malformed ones."""

from __future__ import annotations

from typing import Any

from kombu_couchdb.documents.workitem import new_id

__all__ = ['BROKER', 'RESULTS', 'WORKITEM']

NOW = 1_790_000_000.0

_MESSAGE: dict[str, Any] = {
    'body': '[[1], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
    'content-type': 'application/json',
    'content-encoding': 'utf-8',
    'headers': {'id': 'task-1', 'task': 'add', 'eta': None, 'expires': None, 'lang': 'py'},
    'properties': {
        'delivery_tag': 'x',
        'body_encoding': 'utf-8',
        'priority': 0,
        'delivery_mode': 2,
        'delivery_info': {'exchange': '', 'routing_key': 'q'},
    },
}

WORKITEM: dict[str, Any] = {
    '_id': new_id(NOW),
    'type': 'WorkItem',
    'queue': 'q',
    'priority': 0,
    'date': None,
    'published': NOW,
    'attempts': 0,
    'claimed': None,
    'message': _MESSAGE,
}

_ENTRY = {name: WORKITEM[name] for name in ('priority', 'date', 'published', 'message')}

#: The documents in a broker's database, by kind.
BROKER: dict[str, dict[str, Any]] = {
    'waiting': WORKITEM,
    'scheduled': {**WORKITEM, '_id': 'scheduled', 'date': NOW - 1, 'expires': NOW + 1e9},
    'claimed': {
        **WORKITEM,
        '_id': 'claimed',
        'attempts': 1,
        'consumer': 'broker:consumer:gone',
        'claimed': {'by': 'broker:consumer:gone', 'date': NOW},
    },
    'expired': {**WORKITEM, '_id': 'expired', 'expires': NOW - 1e9},
    'dead': {**WORKITEM, '_id': 'dead', 'status': 'fail', 'reason': 'rejected', 'failed': NOW},
    'unique': {**WORKITEM, '_id': 'job:["q","add","k"]', 'key': 'k', 'sent': NOW, 'next': [_ENTRY, _ENTRY]},
    'unique, claimed': {
        **WORKITEM,
        '_id': 'job:["q","add","l"]',
        'key': 'l',
        'sent': NOW,
        'next': [_ENTRY],
        'claimed': {'by': 'broker:consumer:gone', 'date': NOW},
        'attempts': 1,
    },
    'unique, attached': {
        **WORKITEM,
        '_id': 'job:["q","add","m"]',
        'key': 'm',
        '_attachments': {'body': {'content_type': 'text/plain', 'data': 'aGVsbG8='}},
    },
    'consumer': {
        '_id': 'broker:consumer:gone',
        'type': 'Consumer',
        'layout': 'celery-v8',
        'host': 'h',
        'pid': 5,
        'queues': ['q'],
        'beats': 0,
        'date': NOW,
        'expires': NOW,
        'rates': {'q': 0.5},
    },
    'queue': {
        '_id': 'broker:queue:limited',
        'type': 'Queue',
        'name': 'limited',
        'auto_delete': True,
        'expires': NOW,
        'lifetime': 60.0,
        'arguments': {'x-max-length': 1, 'x-message-ttl': 1, 'x-delivery-limit': 3, 'x-expires': 60000},
    },
    'binding': {
        '_id': 'broker:binding:["direct","a","bound"]',
        'type': 'Binding',
        'exchange': 'direct',
        'routing_key': 'a',
        'pattern': None,
        'queue': 'bound',
    },
    'topic': {
        '_id': 'broker:binding:["topic","a.#","bound"]',
        'type': 'Binding',
        'exchange': 'topic',
        'routing_key': 'a.#',
        'pattern': r'^\.a(?:\.[^.]*)*$',
        'queue': 'bound',
    },
    'broadcast': {
        '_id': 'broker:broadcast:1',
        'type': 'Broadcast',
        'exchange': 'fanout',
        'routing_key': '',
        'publisher': 'p',
        'number': 1,
        'date': NOW,
        'expires': NOW + 60,
        'message': _MESSAGE,
    },
}

_CHORD: dict[str, Any] = {
    '_id': 'chord-unlock-g',
    'type': 'Chord',
    'size': 1,
    'added': [],
    'nested': False,
    'claimed': None,
    'sent': False,
    'run': 'r',
    'date': NOW,
    'expires': NOW + 1e9,
    'body': {'value': {'body': {'task': 'add', 'args': [], 'kwargs': {}, 'options': {}}}},
}

#: The documents in a result database, by kind.
RESULTS: dict[str, dict[str, Any]] = {
    'result': {
        '_id': 'celery-task-meta-t',
        'type': 'Result',
        'status': 'SUCCESS',
        'task': 'add',
        'date': NOW,
        'expires': NOW + 1e9,
        'value': {
            'task_id': 't',
            'status': 'SUCCESS',
            'result': 5,
            'traceback': None,
            'children': [],
            'date_done': None,
        },
    },
    'expired': {
        '_id': 'celery-task-meta-old',
        'type': 'Result',
        'status': 'SUCCESS',
        'task': 'add',
        'date': NOW,
        'expires': NOW,
        'value': {'task_id': 'old', 'status': 'SUCCESS', 'result': 5, 'traceback': None, 'children': []},
    },
    'group': {
        '_id': 'celery-taskset-meta-g',
        'type': 'Group',
        'status': None,
        'date': NOW,
        'expires': NOW + 1e9,
        'value': {'result': [['g', None], []]},
    },
    'chord': _CHORD,
    'chord, claimed': {**_CHORD, '_id': 'chord-unlock-claimed', 'claimed': 'somebody', 'sent': True},
    'chord, expired': {**_CHORD, '_id': 'chord-unlock-expired', 'expires': NOW},
    'part': {
        '_id': 'chord-unlock-g:part:00000000:t',
        'type': 'Part',
        'task_id': 't',
        'index': 0,
        'state': 'SUCCESS',
        'date': NOW,
        'expires': NOW + 1e9,
        'value': {'value': {'task_id': 't', 'status': 'SUCCESS', 'result': 5}},
    },
}
