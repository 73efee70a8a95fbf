"""Values and exceptions, which tasks get, return and raise."""

from __future__ import annotations

import asyncio
import decimal
import enum
import math
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

from celery import exceptions

__all__ = ['EXCEPTIONS', 'VALUES', 'shown']


@dataclass
class Point:
    """A value of a program."""

    x: int


class Colour(enum.Enum):
    """A value of a program that is not JSON."""

    RED = 'red'


class Level(int, enum.Enum):
    """A value of a program that is JSON."""

    HIGH = 2


Pair = namedtuple('Pair', 'a b')


def _nested(levels: int) -> Any:
    return [_nested(levels - 1)] if levels else []


VALUES: dict[str, Any] = {
    'none': None,
    'true': True,
    'zero': 0,
    'negative': -7,
    'integer of 53 bits': 2**53 - 1,
    'integer of 64 bits': 2**64 + 1,
    'integer of 40 digits': 10**40,
    'whole float': 2.0,
    'float': 0.1,
    'negative zero': -0.0,
    'small float': 1.5e-310,
    'large float': 1.7e308,
    'nan': math.nan,
    'infinity': [math.inf, -math.inf],
    'empty text': '',
    'unicode': 'ü 😀 e\u0301 \u202e',
    'nul and control characters': 'a\x00b\x01\x7f',
    'line separators': 'a\u2028b\u2029c\r\nd',
    'surrogate': '\ud800',
    'surrogate in a key': {'\udfff': 1},
    'text like JSON': '{"a": [1]}',
    'list': [1, 'a', None, [True]],
    'empty containers': [[], {}, ''],
    'object': {'a': {'b': [{'c': None}]}},
    'keys of CouchDB': {'_id': 1, '_rev': '1-x', '_attachments': {'a': 1}, '_deleted': True},
    'keys of Celery': {'status': 'FAILURE', 'result': 1, 'task_id': 'x', 'exc_type': 'E', 'exc_message': 'm'},
    'keys of JavaScript': {'constructor': 1, 'toString': 2},
    '__proto__': {'__proto__': {'a': 1}},
    'keys of kombu': {'__type__': 'x'},
    'empty key': {'': 1},
    'keys that are numbers': {1: 'a', 2.5: 'b'},
    'keys that are not text': {None: 1, True: 2},
    'order of keys': {'b': 1, 'a': 2, 'c': 3},
    'tuple': (1, (2,)),
    'set': {1},
    'frozenset': frozenset('a'),
    'bytes': b'\x00\xff',
    'bytearray': bytearray(b'ab'),
    'datetime': datetime(2026, 1, 2, 3, 4, 5, 678901),
    'datetime with a zone': datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))),
    'date': date(2026, 1, 2),
    'time': time(3, 4, 5),
    'timedelta': timedelta(days=1, seconds=2),
    'decimal': decimal.Decimal('1.10'),
    'uuid': uuid.UUID(int=7),
    'complex': 1j,
    'enumeration': Colour.RED,
    'enumeration of integers': Level.HIGH,
    'named tuple': Pair(1, 2),
    'ordered dict': OrderedDict(b=1, a=2),
    'dataclass': Point(1),
    'class': Point,
    'function': _nested,
    'lambda': lambda: None,
    'exception as a value': ValueError('a value'),
    '90 levels': _nested(90),
    'many members': {str(number): number for number in range(2000)},
    'large text': 'x' * 500_000,
    'large unicode': 'ü' * 20_000,
    'large bytes': b'\xff' * 200_000,
}


class Own(Exception):
    """An exception of a program."""


class Keyword(Exception):
    """An exception with a keyword, which `pickle` cannot make again."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f'code {code}')
        self.code = code


class Arguments(Exception):
    """An exception whose arguments are not those of its class."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f'{name}: {code}')
        self.name, self.code = name, code


class State(Exception):
    """An exception with a member that is not one of its arguments."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.extra = 'kept'


class OwnBase(BaseException):
    """An exception that `except Exception` does not catch."""


def _chained(**how: Any) -> Exception:
    try:
        try:
            raise KeyError('inner')
        except KeyError as inner:
            raise Own('outer') from (inner if how.get('cause') else None)
    except Own as exc:
        return exc


def _local() -> Exception:
    class Local(Exception):
        pass

    return Local('local')


def _group() -> Any:
    try:
        return ExceptionGroup('many', [ValueError('a'), Own('b')])  # type: ignore[name-defined, unused-ignore]
    except NameError:
        raise ImportError('ExceptionGroup') from None


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    'built in': lambda: ValueError('no'),
    'without arguments': ValueError,
    'several arguments': lambda: ValueError('a', 2, None, [3]),
    'KeyError': lambda: KeyError('no such'),
    'KeyError with a tuple': lambda: KeyError(('a', 1)),
    'OSError': lambda: FileNotFoundError(2, 'No such file', '/x'),
    'UnicodeDecodeError': lambda: UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'bad'),
    'StopIteration': lambda: StopIteration(3),
    'own': lambda: Own('mine'),
    'own with a keyword': lambda: Keyword(code=4),
    'own with other arguments': lambda: Arguments('a', 4),
    'own with a state': lambda: State('s'),
    'own with a value that is not JSON': lambda: Own(decimal.Decimal('1.1'), date(2026, 1, 2), {1}, b'\xff'),
    'own with a value that cannot be pickled': lambda: Own(lambda: None),
    'own with a dataclass': lambda: Own(Point(1)),
    'local class': _local,
    'own with a cause': lambda: _chained(cause=True),
    'own with a context': _chained,
    'unicode': lambda: Own('ü 😀 \u2028 \x00'),
    'surrogate': lambda: Own('\ud800'),
    'large': lambda: Own('x' * 300_000),
    'nan': lambda: Own(math.nan),
    'exception in an exception': lambda: Own(KeyError('inner')),
    'group of exceptions': _group,
    'TimeoutError of Celery': lambda: exceptions.TimeoutError('late'),
    'Terminated': lambda: exceptions.Terminated('by hand'),
    'TaskError': lambda: exceptions.TaskError('task'),
    'SystemExit': lambda: SystemExit(3),
    'KeyboardInterrupt': KeyboardInterrupt,
    'GeneratorExit': GeneratorExit,
    'own BaseException': lambda: OwnBase('base'),
    'asyncio.CancelledError': lambda: asyncio.CancelledError('stop'),
}


def shown(value: Any) -> str:
    """Return a text with type and contents of a value or exception. Of a large one it has the size and the ends."""
    if isinstance(value, BaseException):
        kind = type(value)
        text = f'{kind.__module__}.{kind.__qualname__}{tuple(value.args)!r}'
        members = {name: each for name, each in vars(value).items() if name in ('extra', 'code', 'name')}
        text += f' {members}' if members else ''
        text += f' from {type(value.__cause__).__name__}' if value.__cause__ else ''
    else:
        text = f'{type(value).__name__} {value!r}'
    return text if len(text) < 400 else f'{text[:60]}…{len(text)}…{text[-20:]}'
