"""Find a task by its id or the beginning of it, or by its name: the field in the side bar leads there."""

from __future__ import annotations

from starlette.responses import Response

from ...resources.columns import Column
from ..tables import Table
from ..view import Page, View

#: The maximum number of names of tasks that are offered.
_LIMIT = 100


def show(view: View) -> Response:
    """Send the browser to the task or the jobs that the text names, or offer the names that have the text in them."""
    text = view.param('q').strip()
    known = view.known['task']
    names = [name for name in known if text.lower() in name.lower()]
    if text in known or (len(names) == 1 and len(text) > 2):
        return view.redirect('/jobs', task=text if text in known else names[0])
    if text and not names:
        return view.redirect('/jobs', task=text) if '.' in text else view.redirect(f'/tasks/{text}')
    table = Table.of(
        'Tasks of the app',
        [Column('TASK', 'name')],
        [{'name': name} for name in names[:_LIMIT]],
        lambda row: row['name'],
        links={'TASK': lambda row: view.link('/jobs', task=row['name'])},
        empty='The app has no tasks. Give the id of a task, or its first four characters.',
    )
    hint = 'Give the id of a task, its first four characters or more, or a name:'
    return view.render('tables.html', hint=hint, numbers=(), remarks=(), tables=[table])


page = Page('/find', 'Find', show, in_menu=False)
