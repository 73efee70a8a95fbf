"""Pages and their requests: a `View` is a request with its user, and a `Page` answers it.

A page is a module in `pages` with an object `page`: its path, its title, a function that shows it, and its actions. To
add one, name its module in `pages.PAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ..audit import Changes
from ..resources.change import Change
from ..resources.columns import Row, Tone, json_line
from ..resources.fields import Field
from ..resources.queues import queue_rows, queue_warnings
from .live import StatusReading
from .recent_history import RecentHours
from .sessions import Session
from .site import Site

#: The fields of a form, or nothing.
Form = ImmutableMultiDict[str, str]


class View:
    """One request, its user, and the ways to answer it."""

    def __init__(self, site: Site, request: Request, session: Session, form: Form, page: Page | None = None) -> None:
        self.site, self.request, self.session, self.form, self.page = site, request, session, form, page
        #: The user's CouchDB account, with its clients.
        self.account = session.account

    @property
    def may_act(self) -> bool:
        """Whether the user may change anything."""
        return self.account.may_act and not self.site.read_only and not self.session.is_program

    @property
    def is_fragment(self) -> bool:
        """Whether the browser wants the changing part of the page alone, because something has changed."""
        return 'hx-request' in self.request.headers

    def snapshot(self) -> StatusReading:
        """Return what was read of the broker's database last, for a program with all of it; see `Live.snapshot`."""
        return self.account.live.snapshot(fully=self.wants_json)

    def history(self) -> RecentHours:
        """Return the history of tasks and queues; see `RecentHistory.read`."""
        return self.account.live.history.read()

    def param(self, name: str, default: str = '') -> str:
        """Return a parameter of the URL."""
        return self.request.query_params.get(name, default)

    def link(self, path: str, /, **query: Any) -> str:
        """Return the URL of a page, wherever the application is mounted; `query` without what is None or empty.

        A value of `query` may be a list.
        """
        return link(self.request, path, **query)

    def names(self) -> dict[str, Callable[[Row], str | None]]:
        """Return by title of a column where the names in it lead to, for `Table.of`."""

        def leads(path: str, member: str) -> Callable[[Row], str | None]:
            return lambda row: self.link(path, **{member: row[member]}) if row.get(member) else None

        return {
            'TASK': leads('/jobs', 'task'),
            'QUEUE': leads('/jobs', 'queue'),
            'WORKER': leads('/workers', 'worker'),
        }

    def asset(self, name: str) -> str:
        """Return the URL of a static file, which changes with its content."""
        return self.link(f'/static/{name}', v=self.site.versions.get(name))

    @property
    def known(self) -> Mapping[str, Sequence[str]]:
        """Suggestions for fields: queues and tasks that are known, by name of a field."""
        found = self.account.live.last
        return {
            'queue': sorted(found.status['queues']) if found else (),
            'task': sorted(name for name in self.site.app.tasks if not name.startswith('celery.')),
        }

    @property
    def warnings(self) -> list[tuple[str, list[str]]]:
        """What every page says of queues, as they were a moment ago: sentences, each with the names of queues."""
        found = self.account.live.recent()
        return queue_warnings(queue_rows(found.status)) if found else []

    @property
    def reason(self) -> str | None:
        """Why the user does something, as the form says."""
        return self.form.get('reason', '').strip() or None

    @property
    def texts(self) -> dict[str, list[str]]:
        """What the form has, by name of a field."""
        return {name: [value for value in self.form.getlist(name) if isinstance(value, str)] for name in self.form}

    @property
    def path(self) -> str:
        """The URL of this page without its query."""
        return self.link(own_path(self.request))

    @property
    def here(self) -> str:
        """The URL of this page."""
        query = self.request.url.query
        return self.path + (f'?{query}' if query else '')

    def render(self, template: str, status: int = 200, **context: Any) -> Response:
        """Return a page: `template` with this context, the view, and what the last action has left to say."""
        notices = list[tuple[str, str]]()
        if not self.is_fragment:
            notices, self.session.notices = self.session.notices, []
        text = self.site.templates.get_template(template).render(
            view=self,
            site=self.site,
            page=self.page,
            notices=notices,
            layout='fragment.html' if self.is_fragment else 'page.html',
            **context,
        )
        return HTMLResponse(text, status)

    def json(self, found: Any) -> Response:
        """Return JSON: what the command of the same name prints, a list instead of one line for each item."""
        return json_response(found)

    def json_list(self, rows: Sequence[Any], after: str | None) -> Response:
        """Return a part of a list as JSON. The header `Link` leads to the next part, which begins after `after`."""
        response = self.json(rows)
        if after:
            given = self.request.query_params
            query = {**{name: given.getlist(name) for name in given}, 'after': after}
            response.headers['Link'] = f'<{self.link(self.page.path if self.page else "/", **query)}>; rel="next"'
        return response

    def notice(self, text: str, tone: Tone = 'good') -> None:
        """Let the next page say something first."""
        self.session.notices = [*self.session.notices[-4:], (tone, text)]

    def redirect(self, path: str, /, **query: Any) -> Response:
        """Send the browser to a page of this application."""
        return redirect(self.request, path, **query)

    def offered(self, *rows: str) -> list[Action]:
        """Return the actions of the page for so many rows (`Action.rows`) that the user may see."""
        actions = self.page.actions if self.page and self.may_act else ()
        return [action for action in actions if action.rows in rows and action.is_offered(self)]

    def count(self, page: Page) -> int | None:
        """Return the number beside a page in the menu, of what was read last."""
        found = self.account.live.last
        return page.count(found) if found else None

    @property
    def wants_json(self) -> bool:
        """Whether a program asks."""
        return wants_json(self.request)


class ActionOutcome(NamedTuple):
    """What came of an action."""

    #: One sentence.
    text: str
    tone: Tone = 'good'
    #: By target, what was changed.
    changes: Mapping[str, Changes] | None = None


class InputRefused(Exception):
    """An action cannot be done with what the user has typed; the text says why, in one sentence."""


@dataclass(frozen=True)
class Action:
    """Something that users can do to the selected rows of a page."""

    #: A word for the form.
    name: str
    #: The text of the button.
    title: str
    #: Does it to the targets, and says what came of it, or returns the change that does it, part by part. May raise
    #: `CouchDBError`, and `InputRefused` to ask again.
    act: Callable[[View, Sequence[str]], ActionOutcome | Change]
    #: The question before it: `Purge {}?`, with the targets in the place of the braces; '' to ask nothing.
    question: str = ''
    #: What it means, in one sentence or two.
    consequence: str = ''
    #: `bad` if it destroys something.
    tone: Tone = ''
    #: What else it asks, or a function of the view and the targets that returns that. It may raise `InputRefused`.
    fields: Sequence[Field] | Callable[[View, Sequence[str]], Sequence[Field]] = ()
    #: How many rows it is for: any number, one, or none, because it makes a new one; or all that match a filter, which
    #: is the target then.
    rows: Literal['any', 'one', 'none', 'match'] = 'any'
    #: Returns the targets as words for the question, if they are no names. It may raise `InputRefused`.
    describe: Callable[[View, Sequence[str]], str] | None = None
    #: Returns the next dates of what the form says, which can be looked at before. It may raise `InputRefused`.
    preview: Callable[[View, Sequence[str]], Sequence[float]] | None = None
    #: Returns the names of targets, if they are not the targets.
    names: Callable[[View, Sequence[str]], Sequence[str]] = lambda view, targets: targets
    #: Whether it is there for the user of a view.
    is_offered: Callable[[View], bool] = lambda view: True

    def fields_for(self, view: View, targets: Sequence[str]) -> Sequence[Field]:
        """Return the fields of the form."""
        return self.fields(view, targets) if callable(self.fields) else self.fields


def selected(view: View) -> list[str]:
    """Return what the boxes of a table select."""
    return list(dict.fromkeys(view.form.getlist('select')))


@dataclass(frozen=True)
class Page:
    """A page: its path, and who answers requests to it."""

    path: str
    title: str
    show: Callable[[View], Response]
    actions: Sequence[Action] = ()
    #: What the rows of the page are called, as in `3 queues`.
    noun: str = 'row'
    #: Returns the targets of an action.
    targets: Callable[[View], Sequence[str]] = selected
    #: Whether it is in the menu, and which number stands beside it there, if any.
    in_menu: bool = True
    #: Whether it is the first page that a user sees, if no page before it in the menu is.
    is_first: Callable[[View], bool] = lambda view: True
    count: Callable[[StatusReading], int | None] = lambda snapshot: None
    #: Tells whether a Celery app has what the page shows. Otherwise it has no such page.
    applies: Callable[[Any], bool] = lambda app: True


def own_path(request: Request) -> str:
    """Return the path of a request within this application, without its query."""
    path: str = request.scope['path']
    return path.removeprefix(request.scope.get('root_path', '')) or '/'


def link(request: Request, path: str, /, **query: Any) -> str:
    """Return the URL of a page, wherever the application is mounted; `query` without what is None or empty.

    It has no host, and browsers read none in it, whatever the path is: it leads to this application.
    """
    given = {name: value for name, value in query.items() if value not in (None, '', [])}
    root: str = request.scope.get('root_path', '').rstrip('/')
    return (
        f'{root}/'
        + quote(path.lstrip('/'), safe="/~:@!$&'()*+,;=", errors='replace')
        + (f'?{urlencode(given, doseq=True, errors="replace")}' if given else '')
    )


def redirect(request: Request, path: str, /, **query: Any) -> Response:
    """Send the browser to a page of this application, see `link`."""
    return RedirectResponse(link(request, path, **query), 303)


def wants_json(request: Request) -> bool:
    """Tell whether a program asks, and no browser."""
    if 'format' in request.query_params:
        return request.query_params['format'] == 'json'
    accepted = request.headers.get('accept', '')
    return 'application/json' in accepted and 'text/html' not in accepted


def json_response(found: Any, status: int = 200) -> Response:
    """Return JSON for a program."""
    return Response(json_line(found) + '\n', status, media_type='application/json')
