"""Actions of pages: each needs the token of its session, asks before it destroys something, and leaves a record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.errors import ConfigurationError, CouchDBError

from .. import audit
from ..resources.change import Change
from ..resources.resource import counted
from .operations import Operation
from .view import Action, ActionOutcome, InputRefused, Page, View, own_path

#: The maximum number of targets that a question names.
_MAX_NAMED = 5

#: The maximum number of targets of one action.
_MAX_TARGETS = 1000

#: For how long a page waits for the end of an action before it says that it goes on, in seconds.
_FOREGROUND_SECONDS = 1.5


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
        if action.preview and 'preview' in view.form:
            return _ask(view, page, action, targets, dates=action.preview(view, targets))
        outcome = _done(view, page, action, targets)
    except InputRefused as exc:
        return _ask(view, page, action, targets, sentence(str(exc)))
    with suppress(CouchDBError):
        view.account.live.reread()
    return _back(view, outcome)


def each(view: View, targets: Sequence[str], act: Callable[[str], str], noun: str) -> ActionOutcome:
    """Call `act` with each target, and return one outcome: what it returns, and why it was refused to do it.

    `noun` is the plural for several targets.
    """
    done, refused = defaultdict[str, list[str]](list), list[str]()
    for target in targets:
        try:
            done[act(target)].append(target)
        except (CouchDBError, ValueError) as exc:
            refused.append(str(exc))
    parts = [f'{names[0] if len(names) == 1 else f"{len(names):,} {noun}"}: {text}' for text, names in done.items()]
    more = [f'and {len(refused) - _MAX_NAMED:,} more were refused'] if len(refused) > _MAX_NAMED else []
    text = '; '.join([*parts, *refused[:_MAX_NAMED], *more])
    return ActionOutcome(f'{text}.' if parts else sentence(text), 'bad' if refused else 'good')


def sentence(text: str) -> str:
    """Return the text of an error as a sentence."""
    return f'{text[:1].upper()}{text[1:].rstrip(".")}.'


def _ask(
    view: View,
    page: Page,
    action: Action,
    targets: Sequence[str],
    problem: str = '',
    dates: Sequence[float] | None = None,
) -> Response:
    """Return the form that asks before an action; once more with `problem`, or the next dates of what was typed."""
    again = problem or dates is not None
    try:
        fields = action.fields_for(view, targets)
        hidden = {field.name: field.value for field in fields if field.kind == 'hidden'}
        if is_changed := any(view.form.get(name, value) != value for name, value in hidden.items()):
            problem = problem and f'{problem} This is how it is now.'
        what = action.describe(view, targets) if action.describe else described(page, targets)
        named = action.names(view, targets[:_MAX_NAMED]) if len(targets) > 1 and action.rows != 'match' else ()
    except (InputRefused, ConfigurationError) as exc:
        return _back(view, ActionOutcome(sentence(str(exc)), 'warning'))
    return view.render(
        'confirm.html',
        422 if problem else 200,
        action=action,
        targets=targets,
        question=action.question.format(what),
        named=named,
        query=view.form.get('query', ''),
        fields=[field.filled(view.texts) for field in fields] if again and not is_changed else fields,
        dates=dates,
        problem=problem,
        reason=view.reason or '',
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
    """Do it, record it, and return what came of it; what takes longer goes on in the background."""
    what = action.describe(view, targets) if action.describe else described(page, targets)
    subjects = [what] if action.rows == 'match' else targets

    title, broker = action.title.lower(), view.account.broker
    verb = f'let {page.noun} {title}' if ' a ' in title else f'{title} {page.noun}'
    known = (broker, view.session.name, verb, subjects)
    try:
        found = action.act(view, targets)
        if isinstance(found, Change):
            end = partial(_recorded, audit.begin(*known, view.reason))
            return _in_background(view, action, Operation(view.session.name, f'{action.title} {what}', found, end))
    except CouchDBError as exc:
        found = ActionOutcome(f'{action.title}: {exc}', 'bad')
    changes = found.changes
    return found._replace(text=_recorded(lambda text: audit.record(*known, text, view.reason, changes), found.text))


def _recorded(record: Callable[[str], object], text: str) -> str:
    """Record what came of an action, and return what to say of it."""
    try:
        record(text)
    except CouchDBError as exc:
        return f'{text} The record of it could not be stored: {exc}'
    return text


def _in_background(view: View, action: Action, operation: Operation) -> ActionOutcome:
    """Begin an operation, and return what came of it if it ends soon; *raises* `InputRefused` if it did nothing."""
    view.site.operations.begin(operation)
    if not operation.wait(_FOREGROUND_SECONDS):
        text = f'{operation.title}: this goes on in the background; Activity will say how it ended.'
        return ActionOutcome(text, 'info')
    view.site.operations.forget(operation)
    change = operation.change
    is_refused = operation.tone == 'bad' and not change.done.total()
    if is_refused and action.fields and (change.total == 1 or isinstance(operation.error, ConfigurationError)):
        raise InputRefused(operation.outcome)
    return ActionOutcome(operation.outcome, operation.tone)
