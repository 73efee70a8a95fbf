"""Scenarios of canvas: each is a signature; its outcome is what `get()` says, all results around it, and the notes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from celery import chain, chord, group
from celery.canvas import StampingVisitor

__all__ = ['CANVAS', 'ENDLESS']

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
LINEAGE = 'id parent_id root_id group group_index'


class Stamps(StampingVisitor):
    """Stamps each signature with a name."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        """Return the headers of a task."""
        return {'stamp': f'on {sig.name}', 'stamped_headers': ['stamp']}


def stamped(sig: Any, **stamps: Any) -> Any:
    """Return the signature with stamps."""
    sig.stamp(*([] if stamps else [Stamps()]), **stamps)
    return sig


def linked(sig: Any, *links: Any, error: Any = ()) -> Any:
    """Return the signature with callbacks and errbacks."""
    for link in links:
        sig.link(link)
    for errback in [error] if isinstance(error, dict) else error:
        sig.link_error(errback)
    return sig


def adds(t: Any, *numbers: int) -> list[Any]:
    """Return tasks that add 1 to numbers."""
    return [t.add.s(number, 1) for number in numbers]


CANVAS: dict[str, Callable[[Any], Any]] = {
    # -- chains
    'task': lambda t: t.add.s(1, 1),
    'chain': lambda t: chain(t.add.s(1, 1), t.add.s(2), t.add.s(3)),
    'chain of one': lambda t: chain(t.add.s(1, 1)),
    'chain of none': lambda t: chain(),
    'chain of chains': lambda t: chain(chain(t.add.s(1, 1), t.add.s(2)), chain(t.add.s(3), chain(t.add.s(4)))),
    'chain of twenty': lambda t: chain(t.add.s(1, 1), *[t.add.s(1)] * 19),
    'chain with keywords': lambda t: chain(t.same.s(1), t.same.s(2, key=3), t.same.s(b=4)),
    'chain with immutable steps': lambda t: chain(t.add.s(1, 1), t.add.si(5, 5), t.note.si('a'), t.same.s(2)),
    'chain in which a partial fails': lambda t: chain(t.add.s(1, 1), t.add.s(2, 3, 4), t.add.s(1)),
    'chain whose first step fails': lambda t: chain(t.fail.s(), t.add.s(1), t.add.s(1)),
    'chain whose middle fails': lambda t: chain(t.add.s(1, 1), t.fail.s(), t.add.s(1)),
    'chain whose last step fails': lambda t: chain(t.add.s(1, 1), t.fail.s()),
    'chain with a retry': lambda t: chain(t.add.s(1, 1), t.again.s(times=2), t.same.s()),
    'chain with an ignored result': lambda t: chain(t.add.s(1, 1), t.ignored.s(), t.same.s()),
    'chain with an expired step': lambda t: chain(t.add.s(1, 1), t.add.s(1).set(expires=PAST), t.add.s(1)),
    'ancestors in a chain': lambda t: chain(*[t.about.s(fields=LINEAGE)] * 3),
    # -- groups
    'group': lambda t: group(adds(t, 1, 2, 3)),
    'group of none': lambda t: group(),
    'group of one': lambda t: group(adds(t, 1)),
    'group of a generator': lambda t: group(t.add.s(number, 1) for number in range(3)),
    'group of groups': lambda t: group(group(adds(t, 1, 2)), group(group(adds(t, 3)))),
    'group of chains': lambda t: group(chain(t.add.s(1, 1), t.add.s(1)), chain(t.add.s(2, 2), t.add.s(2))),
    'group of chords': lambda t: group(chord(adds(t, 1, 2), t.total.s()), chord(adds(t, 3), t.total.s())),
    'group of fifty': lambda t: group(adds(t, *range(50))),
    'group with a failing member': lambda t: group(t.add.s(1, 1), t.fail.s(), t.add.s(2, 2)),
    'group with an expired member': lambda t: group(t.add.s(1, 1), t.add.s(1, 1).set(expires=PAST)),
    'group after a task': lambda t: t.add.s(1, 1) | group(t.add.s(1), t.add.s(2)),
    'group between tasks': lambda t: t.add.s(1, 1) | group(t.add.s(1), t.add.s(2)) | t.total.s(),
    'group after a group': lambda t: group(adds(t, 1, 2)) | group(t.total.s(), t.same.s()),
    'group, task, group': lambda t: group(adds(t, 1, 2)) | t.total.s() | group(t.add.s(1), t.add.s(2)),
    'groups and tasks in turn': lambda t: chain(
        t.add.s(1, 1), group(t.add.s(1), t.add.s(2)), group(t.total.s(), t.same.s()), t.total.s(), t.add.s(1)
    ),
    'group of one after a task': lambda t: t.add.s(1, 1) | group(t.add.s(1)) | t.same.s(),
    'group of none in a chain': lambda t: chain(t.add.s(1, 1), group(), t.same.s()),
    'group of none, then a task': lambda t: group() | t.total.s(),
    'ancestors in a group': lambda t: chain(
        t.about.s(fields=LINEAGE), group([t.about.s(fields=LINEAGE)] * 2), t.about.s(fields='root_id')
    ),
    # -- chords
    'chord': lambda t: chord(adds(t, 1, 2, 3), t.total.s()),
    'chord called with its body': lambda t: chord(adds(t, 1, 2, 3), t.same.s()),
    'chord of a generator': lambda t: chord((t.add.s(number, 1) for number in range(3)), t.same.s()),
    'chord of one': lambda t: chord(adds(t, 1), t.same.s()),
    'chord of one task without a list': lambda t: chord(t.add.s(1, 1), t.same.s()),
    'chord of none': lambda t: chord([], t.total.s()),
    'chord of fifty': lambda t: chord(adds(t, *range(50)), t.same.s()),
    'chord with large results': lambda t: chord(
        [t.value.s('large text'), t.value.s('large unicode')], t.note.si('end')
    ),
    'chord with small and large results': lambda t: chord(
        [t.same.s('a' * 5000), t.same.s('b'), t.same.s('c' * 20_000)], t.same.s()
    ),
    'chord with results of none': lambda t: chord([t.same.s(None), t.same.s(False), t.same.s([])], t.same.s()),
    'chord with an immutable body': lambda t: chord(adds(t, 1, 2), t.add.si(5, 5)),
    'chord whose body has arguments': lambda t: chord(adds(t, 1, 2), t.same.s('a', key='b')),
    'chord whose body is a chain': lambda t: chord(adds(t, 1, 2), chain(t.total.s(), t.add.s(1), t.add.s(2))),
    'chord whose body is a group': lambda t: chord(adds(t, 1, 2), group(t.total.s(), t.same.s())),
    'chord whose body is a chord': lambda t: chord(adds(t, 1, 2), chord([t.total.s(), t.total.s(1)], t.same.s())),
    'chord in a chain': lambda t: chain(t.add.s(1, 1), chord([t.add.s(1), t.add.s(2)], t.total.s()), t.add.s(1)),
    'chord of chains': lambda t: chord([chain(t.add.s(n, 1), t.add.s(1)) for n in range(3)], t.same.s()),
    'chord of groups': lambda t: chord([group(adds(t, 1, 2)), t.add.s(3, 1), group(adds(t, 4))], t.same.s()),
    'chord of nested groups': lambda t: chord([group(group(adds(t, 1, 2)), group(group(adds(t, 3))))], t.same.s()),
    'chord of chords': lambda t: chord(
        [chord(adds(t, 1, 2), t.total.s()), chord(adds(t, 3, 4), t.total.s())], t.same.s()
    ),
    'chord of chords of chords': lambda t: chord(
        [chord([chord(adds(t, 1, 2), t.total.s()), t.add.s(1, 1)], t.same.s()), t.add.s(0, 0)], t.same.s()
    ),
    'chord of a chain with a chord': lambda t: chord(
        [chain(t.add.s(1, 1), chord([t.add.s(1), t.add.s(2)], t.total.s()), t.add.s(1)), t.add.s(1, 1)], t.same.s()
    ),
    'chord of chains that end with a group': lambda t: chord(
        [chain(t.add.s(1, 1), group(t.add.s(1), t.add.s(2))), t.add.s(5, 5)], t.same.s()
    ),
    'chain of chords': lambda t: chain(
        chord(adds(t, 1, 2), t.total.s()), chord([t.add.s(1), t.add.s(2)], t.total.s()), t.add.s(1)
    ),
    'chain of groups': lambda t: chain(group(adds(t, 1, 2)), t.total.s(), group([t.add.s(1)] * 2), t.total.s()),
    'chord with a retry in the header': lambda t: chord([t.again.s(1, times=2), t.add.s(1, 1)], t.same.s()),
    'chord with a retry in the body': lambda t: chord(adds(t, 1, 2), t.again.s()),
    'chord with ignored results': lambda t: chord([t.ignored.s(1), t.add.s(1, 1), t.ignored.s(2)], t.same.s()),
    'chord with only ignored results': lambda t: chord([t.ignored.s(1), t.ignored.s(2)], t.same.s()),
    'chord with a body that is ignored, then a note': lambda t: chain(chord(adds(t, 1, 2), t.ignored.s()), t.note.s()),
    'chord with a failing member': lambda t: chord([t.add.s(1, 1), t.fail.s(), t.add.s(2, 2)], t.total.s()),
    'chord of one that fails': lambda t: chord([t.fail.s()], t.total.s()),
    'chord with a failing body': lambda t: chord(adds(t, 1, 2), t.fail.s(text='body')),
    'chord with a failing chain': lambda t: chord(
        [chain(t.add.s(1, 1), t.fail.s(), t.add.s(1)), t.add.s(1, 1)], t.same.s()
    ),
    'chord with a failing group': lambda t: chord([group(t.add.s(1, 1), t.fail.s()), t.add.s(1, 1)], t.same.s()),
    'chord with a failing chord': lambda t: chord(
        [chord([t.fail.s(), t.add.s(1, 1)], t.same.s()), t.add.s(1, 1)], t.same.s()
    ),
    'chord with a body that is a failing chain': lambda t: chord(adds(t, 1, 2), chain(t.fail.s(), t.add.s(1))),
    'chord that fails before a chain': lambda t: chain(
        chord([t.fail.s(), t.add.s(1, 1)], t.same.s()), t.same.s(), t.same.s()
    ),
    'chord that fails before a group': lambda t: chord([t.fail.s(), t.add.s(1, 1)], group(t.same.s(), t.total.s())),
    'chord with a retry that gives up': lambda t: chord([t.again.s(times=9), t.add.s(1, 1)], t.same.s()),
    'chord with an expired member': lambda t: chord([t.add.s(1, 1), t.add.s(2, 2).set(expires=PAST)], t.total.s()),
    'chord with an unknown exception': lambda t: chord([t.throw.s('local class'), t.add.s(1, 1)], t.total.s()),
    'ancestors in a chord': lambda t: chain(
        t.about.s(fields=LINEAGE),
        chord([t.about.s(fields=LINEAGE)] * 2, t.about.s(fields='root_id')),
        t.about.s(fields='root_id'),
    ),
    # -- chunks and maps
    'map': lambda t: t.total.map([[1, 2], [3]]),
    'starmap': lambda t: t.add.starmap([(1, 2), (3, 4)]),
    'map in a chain': lambda t: chain(t.total.map([[1, 2], [3]]), t.same.s()),
    'map that fails': lambda t: t.fail.map([1, 2]),
    'map of none': lambda t: t.total.map([]),
    'chunks': lambda t: t.add.chunks([(number, 1) for number in range(7)], 3),
    'group of chunks': lambda t: t.add.chunks(((number, 1) for number in range(5)), 2).group(),
    'chunks, then a task': lambda t: t.add.chunks([(number, 1) for number in range(5)], 2).group() | t.same.s(),
    # -- callbacks
    'link': lambda t: linked(t.add.s(1, 1), t.note.s(), t.note.s('b')),
    'link of a link': lambda t: linked(t.add.s(1, 1), linked(t.add.s(1), t.note.s())),
    'link of a failing task': lambda t: linked(t.fail.s(), t.note.s()),
    'link that fails': lambda t: linked(t.add.s(1, 1), t.fail.s(), error=t.old.s()),
    'immutable link': lambda t: linked(t.add.s(1, 1), t.note.si('called')),
    'link of a chain': lambda t: linked(chain(t.add.s(1, 1), t.add.s(1)), t.note.s()),
    'link of a chord': lambda t: linked(chord(adds(t, 1, 2), t.total.s()), t.note.s()),
    'link that is a chain': lambda t: linked(t.add.s(1, 1), chain(t.add.s(1), t.note.s())),
    'link that is a group': lambda t: linked(t.add.s(1, 1), group(t.note.s(), t.note.s('b'))),
    'link that is a chord': lambda t: linked(t.add.s(1, 1), chord([t.add.s(1), t.add.s(2)], t.note.s())),
    'link in a header': lambda t: chord([linked(t.add.s(1, 1), t.note.s()), t.add.s(2, 2)], t.total.s()),
    'link after a retry': lambda t: linked(t.again.s(1), t.note.s()),
    # -- errbacks
    'errback with an id': lambda t: linked(t.fail.s(), error=t.old.s()),
    'errback with three arguments': lambda t: linked(t.fail.s('argument'), error=t.new.s()),
    'immutable errback': lambda t: linked(t.fail.s(), error=t.note.si('failed')),
    'several errbacks': lambda t: linked(t.fail.s(), error=[t.old.s(), t.new.s(), t.note.s('args')]),
    'errback that fails': lambda t: linked(t.fail.s(), error=[t.new_fails.s(), t.new.s(), t.old.s()]),
    'errback that is a chain': lambda t: linked(t.fail.s(), error=chain(t.note.s(), t.note.s('b'))),
    'errback of a success': lambda t: linked(t.add.s(1, 1), t.note.s(), error=t.old.s()),
    'errback after a retry': lambda t: linked(t.again.s(times=9), error=[t.old.s(), t.new.s()]),
    'errback of an expired task': lambda t: linked(t.add.s(1, 1).set(expires=PAST), error=[t.old.s(), t.new.s()]),
    'errback of a local exception': lambda t: linked(t.throw.s('local class'), error=[t.old.s(), t.new.s()]),
    'errback of an unknown task': lambda t: linked(t.app.signature('unknown'), error=t.old.s()),
    'errback on a chain': lambda t: chain(t.add.s(1, 1), t.fail.s(), t.add.s(1)).on_error(t.old.s()),
    'errback on each step of a chain': lambda t: chain(
        linked(t.add.s(1, 1), error=t.note.si('1')), linked(t.fail.s(), error=t.note.si('2')), t.add.s(1)
    ),
    'errback on a group': lambda t: group(t.add.s(1, 1), t.fail.s()).on_error(t.old.s()),
    'errback on a header': lambda t: chord(
        [t.add.s(1, 1), linked(t.fail.s(), error=[t.old.s(), t.new.s()])], t.total.s()
    ),
    'errback on a body, the header fails': lambda t: chord(
        [t.add.s(1, 1), t.fail.s()], linked(t.total.s(), error=[t.old.s(), t.new.s()])
    ),
    'errback on a body that fails': lambda t: chord(adds(t, 1, 2), linked(t.fail.s(), error=[t.old.s(), t.new.s()])),
    'errback on a chord, the header fails': lambda t: chord([t.add.s(1, 1), t.fail.s()], t.total.s()).on_error(
        t.new.s()
    ),
    'errback on a chord, the body fails': lambda t: chord(adds(t, 1, 2), t.fail.s()).on_error(t.old.s()),
    'errback on a chord, a member has expired': lambda t: chord(
        [t.add.s(1, 1), t.add.s(1, 1).set(expires=PAST)], t.total.s()
    ).on_error(t.new.s()),
    'errback on a chord in a chain': lambda t: chain(
        t.add.s(1, 1), chord([t.add.s(1), t.fail.s()], t.total.s()), t.add.s(1)
    ).on_error(t.note.si('failed')),
    'errback on a group, then a task': lambda t: (group(t.add.s(1, 1), t.fail.s()) | t.total.s()).on_error(t.old.s()),
    'errback on a chord whose body is a group': lambda t: chord(
        [t.add.s(1, 1), t.fail.s()], group(t.total.s(), t.same.s())
    ).on_error(t.note.si('failed')),
    'errback of a chord, in a process of the pool': lambda t: chord(
        [t.add.s(1, 1), t.fail.s()], linked(t.total.s(), error=t.new_in_process.s())
    ),
    'errback of a task, in a process of the pool': lambda t: linked(t.fail.s(), error=t.new_in_process.s()),
    # -- replace and add_to_chord
    'replace by a task': lambda t: t.replace.s('task', 1),
    'replace twice': lambda t: t.replace.s('again', 1),
    'replace by a chain': lambda t: t.replace.s('chain'),
    'replace by a group': lambda t: t.replace.s('group'),
    'replace by a chain with a group': lambda t: t.replace.s('chain with group'),
    'replace by a chord': lambda t: t.replace.s('chord'),
    'replace by a task that fails': lambda t: linked(t.replace.s('failing'), t.note.s(), error=t.old.s()),
    'replace by an empty group': lambda t: t.replace.s('empty group'),
    'replace by an empty chain': lambda t: t.replace.s('empty chain'),
    'replace with a link': lambda t: linked(t.replace.s('chain'), t.note.s()),
    'replace in a chain': lambda t: chain(t.add.s(1, 1), t.replace.si('chain'), t.add.s(100)),
    'replace by a group in a chain': lambda t: chain(t.add.s(1, 1), t.replace.si('group', 5), t.total.s()),
    'replace in a group': lambda t: group(t.replace.s('chain'), t.add.s(1, 1), t.replace.s('group')),
    'replace in a header': lambda t: chord([t.replace.s('chain'), t.add.s(1, 1), t.replace.s('chord')], t.same.s()),
    'replace by a group in a header': lambda t: chord([t.replace.s('group'), t.add.s(1, 1)], t.same.s()),
    'replace of a body': lambda t: chord(adds(t, 1, 2), t.replace.si('chord')),
    'replace that fails in a header': lambda t: chord([t.replace.s('failing'), t.add.s(1, 1)], t.same.s()),
    'add_to_chord outside a chord': lambda t: t.grow.s(1),
    # -- headers, stamps, options
    'stamps': lambda t: stamped(t.about.s(fields='stamps stamped_headers'), a=['x']),
    'stamps of a chain': lambda t: stamped(chain(t.about.s(fields='stamps'), t.about.s(fields='stamps'))),
    'stamps of a chord': lambda t: stamped(chord([t.about.s(fields='stamps')] * 2, t.about.s(fields='stamps args'))),
    'stamps of a callback': lambda t: stamped(linked(t.about.s(fields='stamps'), t.note.s()), a='b'),
    'stamps of a replaced task': lambda t: stamped(t.replace.s('tenant'), a='b'),
    'headers': lambda t: t.about.s(fields='tenant').set(headers={'tenant': 'acme'}),
    'options of a task': lambda t: t.about.s(
        fields='priority expires timelimit origin_ reply_to_ argsrepr kwargsrepr retries lang task routing_key'
    ).set(priority=3, time_limit=60, soft_time_limit=50, argsrepr='(…)'),
    'priority in a chain': lambda t: chain(t.same.s(1), t.about.s(fields='priority')).set(priority=7),
    'priority in a chord': lambda t: chord([t.about.s(fields='priority')] * 2, t.about.s(fields='args priority')).set(
        priority=2
    ),
    'compressed message': lambda t: t.same.s('x' * 9000).set(compression='gzip'),
    'eta in the past': lambda t: t.add.s(1, 1).set(eta=PAST),
    'countdown': lambda t: chord([t.add.s(1, 1).set(countdown=0.2), t.add.s(2, 2)], t.total.s().set(countdown=0.1)),
    'header in a task that a task sends': lambda t: _with_tenant(t, 'tenant'),
    'header in a chain that a task sends': lambda t: _with_tenant(t, 'tenant in chain'),
    'header in a body': lambda t: _with_tenant(t, 'tenant in body'),
    'header after a chord': lambda t: _with_tenant(t, 'tenant after chord'),
    'children of a task': lambda t: t.sends.s('group'),
    'children: a chord': lambda t: t.sends.s('chord'),
    'children: a chain': lambda t: t.sends.s('chain'),
}


def _with_tenant(t: Any, kind: str) -> Any:
    return t.replace.s(kind).set(headers={'tenant': 'acme'})


#: Scenarios whose result never comes: the outcome is only what the results around it and the notes say.
ENDLESS: dict[str, Callable[[Any], Any]] = {
    'ignore': lambda t: linked(t.ignores.s(), t.note.s(), error=t.old.s()),
    'reject': lambda t: linked(t.rejects.s(), t.note.s(), error=t.old.s()),
    'ignore in a chain': lambda t: chain(t.add.s(1, 1), t.ignores.si(), t.add.s(1)),
    'ignore in a header': lambda t: chord([t.add.s(1, 1), t.ignores.s()], t.total.s()),
    'reject in a header': lambda t: chord([t.add.s(1, 1), t.rejects.s()], t.total.s()),
    'ignored result': lambda t: linked(t.ignored.s(1), t.note.s()),
    'result ignored by an option': lambda t: linked(t.add.s(1, 1).set(ignore_result=True), t.note.s()),
    'add_to_chord': lambda t: chord([t.grow.s(1), t.add.s(1, 1)], t.total.s()),
}
