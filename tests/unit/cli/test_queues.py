"""Queues that `celery couchdb queues` selects by names and patterns."""

from __future__ import annotations

import click
import pytest

from celery_couchdb.cli.queues import _select

#: Queues by name, and whether they are temporary.
KNOWN = {'celery': False, 'mail.fast': False, 'mail.slow': False, 'mail.reply': True, 'mail.*': False}


@pytest.mark.parametrize(
    ('patterns', 'every', 'selected'),
    [
        (('mail.s*', 'celery', 'mail.slow'), False, ['mail.slow', 'celery']),
        (('mail.*',), False, ['mail.*']),  # a queue of exactly this name
        (('*.reply', 'mail.reply'), False, None),
        ((), True, ['celery', 'mail.*', 'mail.fast', 'mail.slow']),
        (('CELERY',), False, None),
    ],
)
def test_selection(patterns: tuple[str, ...], every: bool, selected: list[str] | None) -> None:
    if selected is not None:
        assert _select(KNOWN, patterns, every) == selected
    else:
        with pytest.raises(click.ClickException, match=r'there is no queue .*; the queues are celery, mail\.\*, mail'):
            _select(KNOWN, patterns, every)


@pytest.mark.parametrize(('patterns', 'every'), [((), False), (('celery',), True)])
def test_selection_is_required(patterns: tuple[str, ...], every: bool) -> None:
    with pytest.raises(click.UsageError, match=r'Name queues, or give --all\.'):
        _select(KNOWN, patterns, every)


def test_no_queue_was_declared() -> None:
    assert _select({}, (), every=True) == []
    with pytest.raises(click.ClickException, match="there is no queue 'celery': none has been declared yet"):
        _select({}, ('celery',), every=False)
