"""The commands `celery -A app couchdb …`. No other package prints.

Celery loads this package through the entry point `celery.commands` whenever the `celery` program runs. To keep that
fast, each command is imported when it is called, and modules of workers are imported when a worker starts.

A command ends with status 0 after success, with 1 and one sentence after a failure, and with 2 after a usage error.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from celery import signals

from .. import rooms

__all__ = ['couchdb']

#: The modules of the commands, beside those of optional rooms.
_COMMANDS = {
    'setup': 'setup',
    'status': 'status',
    'check': 'status',
    'queues': 'queues',
    'jobs': 'jobs',
    'show': 'failures',
    'remove': 'jobs',
    'failures': 'failures',
    'vacuum': 'vacuum',
    'plan': 'plan',
}


@signals.worker_init.connect
def _on_worker_init(sender: Any = None, **_: Any) -> None:
    if sender is not None and _has_our_broker(sender.app):
        import_module('celery_couchdb.worker.startup').prepare(sender.app, sender.hostname)


def _has_our_broker(app: Any) -> bool:
    with app.connection_for_read() as read, app.connection_for_write() as write:  # does not connect
        return any(str(each.transport_cls).startswith('couchdb') for each in (read, write))


class _Commands(click.Group):
    """A command group. Each command is the object `command` of the module of its name, or `NAME_command` of another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *rooms.COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _COMMANDS.get(cmd_name, cmd_name)
        module = rooms.COMMANDS.get(cmd_name) or (f'{__name__}.{name}' if cmd_name in _COMMANDS else None)
        if module is None:
            return None
        command = 'command' if name == cmd_name else f'{cmd_name}_command'
        found: click.Command = getattr(import_module(module), command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        from celery.exceptions import ImproperlyConfigured

        from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotFound
        from kombu_couchdb.log import printable

        try:
            return super().invoke(ctx)
        except click.UsageError:
            raise  # click prints the usage
        except click.ClickException as exc:
            raise click.ClickException(printable(exc.message)) from exc
        except (DatabaseMissing, NotFound) as exc:
            is_complete = type(exc) not in (DatabaseMissing, NotFound) or 'couchdb setup' in str(exc)
            hint = '' if is_complete else '; run "celery -A your_app couchdb setup"'
            raise click.ClickException(printable(f'{exc}{hint}')) from exc
        except (CouchDBError, ImproperlyConfigured) as exc:
            raise click.ClickException(printable(str(exc))) from exc


@click.group('couchdb', cls=_Commands, context_settings={'help_option_names': ['-h', '--help']})
def couchdb() -> None:
    """Inspect and maintain queues, jobs, failures and databases in CouchDB."""
