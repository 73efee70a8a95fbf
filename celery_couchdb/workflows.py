"""Workflows: the later steps of a chain and the bodies of chords that failed with a task, and run after its retry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Lets a chord that has failed wait again for one of its parts, given the ids of group and task; tells whether it can.
Reopen = Callable[[str, str], bool]


def failed_with(headers: Mapping[str, Any], body: Any, reopen: Reopen) -> Iterator[str]:
    """Yield the ids of a task and of those that failed with it and run after a retry; reopen the chords on the way.

    `headers` and `body` are those of the task's message. The body of a chord that cannot be reopened is left out.
    """
    embedded = body[2] if isinstance(body, (list, tuple)) and len(body) == 3 else None
    first = embedded if isinstance(embedded, dict) else {}
    pending: list[Any] = [{**first, 'task_id': headers.get('id'), 'group_id': headers.get('group')}]
    while pending:
        options = pending.pop()
        if not isinstance(options, dict):
            continue
        task_id, group_id, chord, chain = map(options.get, ('task_id', 'group_id', 'chord', 'chain'))
        if isinstance(task_id, str):
            yield task_id
            if isinstance(chord, dict) and isinstance(group_id, str) and reopen(group_id, task_id):
                pending.append(chord.get('options'))
        pending += [each.get('options') for each in chain if isinstance(each, dict)] if isinstance(chain, list) else []
