"""Actions of pages: each needs the token of its session, asks before it destroys something, and leaves a record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.errors import CouchDBError

from .. import audit
from ..resources.resource import counted
from .view import Action, ActionOutcome, InputRefused, Page, View, own_path

#: The maximum number of targets that a question names.
_MAX_NAMED = 5

#: The maximum number of targets of one action.
_MAX_TARGETS = 1000


def perform(view: View, page: Page) -> Response:
    """Answer a form of a page: ask whether to do it, or do it, and return to the page."""
    check_token(view)
    if not view.may_act:
        raise HTTPException(403, 'You can look at everything here, but change nothing.')
    action = next((one for one in page.actions if one.name == view.form.get('action') and one.is_offered(view)), None)
    if action is None:
        raise HTTPException(400, 'This page has no such action.')
    targets = [] if action.rows == 'none' else page.targets(view)[:_MAX_TARGETS]
    if not targets and action.rows != 'none':
        return _back(view, ActionOutcome(f'Select a {page.noun} first.', 'warning'))
    if action.rows == 'one' and len(targets) > 1:
        return _back(view, ActionOutcome(f'Select one {page.noun} only.', 'warning'))
    if action.question and 'confirmed' not in view.form:
        return _ask(view, page, action, targets)
    try:
        outcome = _done(view, page, action, targets)
    except InputRefused as exc:
        return _ask(view, page, action, targets, sentence(str(exc)))
    with suppress(CouchDBError):
        view.account.live.reread()
    return _back(view, outcome)


def each(view: View, targets: Sequence[str], act: Callable[[str], str]) -> ActionOutcome:
    """Call `act` with each target, and return one outcome: what it returns, and why it was refused to do it."""
    done, refused = defaultdict[str, list[str]](list), list[str]()
    for target in targets:
        try:
            done[act(target)].append(target)
        except (CouchDBError, ValueError) as exc:
            refused.append(str(exc))
    parts = [f'{names[0] if len(names) == 1 else f"{len(names):,}"}: {text}' for text, names in done.items()]
    more = [f'and {len(refused) - _MAX_NAMED:,} more were refused'] if len(refused) > _MAX_NAMED else []
    text = '; '.join([*parts, *refused[:_MAX_NAMED], *more])
    return ActionOutcome(f'{text}.' if parts else sentence(text), 'bad' if refused else 'good')


def sentence(text: str) -> str:
    """Return the text of an error as a sentence."""
    return f'{text[:1].upper()}{text[1:].rstrip(".")}.'


def _ask(view: View, page: Page, action: Action, targets: Sequence[str], problem: str = '') -> Response:
    """Return the form that asks before an action; with `problem`, once more, with what the user has typed."""
    try:
        fields = action.fields_for(view, targets)
        what = action.describe(view, targets) if action.describe else described(page, targets)
    except InputRefused as exc:
        return _back(view, ActionOutcome(sentence(str(exc)), 'warning'))
    return view.render(
        'confirm.html',
        422 if problem else 200,
        action=action,
        targets=targets,
        question=action.question.format(what),
        named=() if action.describe else targets[:_MAX_NAMED],
        query=view.form.get('query', ''),
        fields=[field.filled(view.form) for field in fields] if problem else fields,
        problem=problem,
        reason=view.form.get('reason', ''),
    )


def _back(view: View, outcome: ActionOutcome) -> Response:
    """Return to the page, which says what came of it."""
    view.notice(outcome.text, outcome.tone)
    return view.redirect(own_path(view.request), **parse_qs(view.form.get('query', '')))


def check_token(view: View) -> None:
    """Refuse a form that is not from a page of this session."""
    if not view.session.has_token(view.form.get('token', '')):
        raise HTTPException(403, 'This form is not from your session: load the page again, and try once more.')


def described(page: Page, targets: Sequence[str]) -> str:
    """Return the targets as words: the name of one, or the number of several."""
    if not targets:
        return f'a {page.noun}'
    return f'the {page.noun} {targets[0]}' if len(targets) == 1 else f'these {counted(len(targets), page.noun)}'


def _done(view: View, page: Page, action: Action, targets: Sequence[str]) -> ActionOutcome:
    """Do it, record it, and return what came of it."""
    try:
        outcome = action.act(view, targets)
    except CouchDBError as exc:
        outcome = ActionOutcome(f'{action.title}: {exc}', 'bad')
    what, reason = f'{action.title.lower()} {page.noun}', view.form.get('reason', '').strip()
    try:
        audit.record(
            view.account.broker, view.session.name, what, targets, outcome.text, reason or None, outcome.changes
        )
    except CouchDBError as exc:
        return ActionOutcome(f'{outcome.text} The record of it could not be stored: {exc}', 'warning')
    return outcome
