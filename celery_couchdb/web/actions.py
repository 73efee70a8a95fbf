"""How users change something: with the token of their session, after a question, and with a record of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.errors import CouchDBError

from .. import audit
from ..resources.resource import counted
from .view import Action, Outcome, Page, View

#: The maximum number of targets that a question names.
_MAX_NAMED = 5

#: The maximum number of targets of one action.
_MAX_TARGETS = 1000


def perform(view: View, page: Page) -> Response:
    """Answer a form of a page: ask whether to do it, or do it, and return to the page."""
    check_token(view)
    if not view.may_act:
        raise HTTPException(403, 'You can look at everything here, but change nothing.')
    action = next((action for action in page.actions if action.name == view.form.get('action')), None)
    if action is None:
        raise HTTPException(400, 'This page has no such action.')
    targets = page.targets(view)[:_MAX_TARGETS]
    query = dict(parse_qsl(view.form.get('query', '')))
    if not targets:
        view.notice(f'Select a {page.noun} first.', 'warning')
        return view.redirect(view.request.scope['path'].removeprefix(view.request.scope['root_path']), **query)
    if action.question and 'confirmed' not in view.form:
        return view.render(
            'confirm.html',
            action=action,
            targets=targets,
            question=action.question.format(described(page, targets)),
            named=targets[:_MAX_NAMED],
            query=view.form.get('query', ''),
        )
    outcome = _done(view, page, action, targets)
    view.notice(outcome.text, outcome.tone)
    with suppress(CouchDBError):
        view.account.live.reread()
    return view.redirect(view.request.scope['path'].removeprefix(view.request.scope['root_path']), **query)


def check_token(view: View) -> None:
    """Refuse a form that is not from a page of this session."""
    if not view.session.has_token(view.form.get('token', '')):
        raise HTTPException(403, 'This form is not from your session: load the page again, and try once more.')


def described(page: Page, targets: Sequence[str]) -> str:
    """Return the targets as words: the name of one, or the number of several."""
    return f'the {page.noun} {targets[0]}' if len(targets) == 1 else f'these {counted(len(targets), page.noun)}'


def _done(view: View, page: Page, action: Action, targets: Sequence[str]) -> Outcome:
    """Do it, record it, and return what came of it."""
    try:
        outcome = action.act(view, targets)
    except CouchDBError as exc:
        outcome = Outcome(f'{action.title}: {exc}', 'bad')
    what, reason = f'{action.title.lower()} {page.noun}', view.form.get('reason', '').strip()
    try:
        audit.record(view.account.broker, view.session.name, what, targets, outcome.text, reason or None)
    except CouchDBError as exc:
        return Outcome(f'{outcome.text} The record of it could not be stored: {exc}', 'warning')
    return outcome
