"""The commands `celery -A app couchdb …`. No other package prints.

Celery loads this package through the entry point `celery.commands` whenever the `celery` program runs. To keep that
fast, each command is imported when it is called, and modules of workers are imported when a worker starts.

A command ends with status 0 after success, with 1 and one sentence after a failure, and with 2 after a usage error.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from celery import signals

if TYPE_CHECKING:
    from ..room import Room


__all__ = ['couchdb']

#: The modules of the commands, beside those of optional rooms.
_COMMANDS = {
    'setup': '.setup',
    'status': '.status',
    'check': '.status',
    'queues': '.queues',
    'jobs': '.jobs',
    'show': '.failures',
    'failures': '.failures',
    'vacuum': '.vacuum',
    'plan': '.plan',
    'web': '..web.cli',
}


def _of_rooms() -> dict[str, Room]:
    from ..rooms import rooms

    return {room.command_name: room for room in rooms() if room.command_name}


@signals.worker_init.connect
def _on_worker_init(sender: Any = None, **_: Any) -> None:
    if sender is not None and _has_our_broker(sender.app):
        import_module('celery_couchdb.worker.startup').prepare(sender.app, sender.hostname)


def _has_our_broker(app: Any) -> bool:
    with app.connection_for_read() as read, app.connection_for_write() as write:  # does not connect
        return any(str(each.transport_cls).startswith('couchdb') for each in (read, write))


class _Commands(click.Group):
    """A command group. Each command is the object `NAME_command` of its module, or else `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_of_rooms()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if room := _of_rooms().get(cmd_name):
            return room.command()  # type: ignore[no-any-return]
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(_COMMANDS[cmd_name], __name__)
        return getattr(module, f'{cmd_name}_command', module.command)  # type: ignore[no-any-return]

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
    """Queues, jobs, failures and databases: see and change them."""
