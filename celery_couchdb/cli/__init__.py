"""`celery -A app couchdb …`: only this package prints.

Celery loads it each time its program runs, through the entry point `celery.commands`, and so each command is imported when
it is asked for, and `celery_couchdb.control` and `.parcels.worker` when a worker starts. A command ends with status 0, with 1 and
one sentence if it could not do what it was asked to do, and with 2 if it was asked wrongly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from celery import signals

from .. import brevity, redaction

__all__ = ['couchdb']

redaction.install()
brevity.shorten_traceback()

_COMMANDS = ('setup', 'status', 'jobs', 'dead', 'remove', 'vacuum')


@signals.worker_init.connect
def _on_worker_init(**_: Any) -> None:
    brevity.shorten_log()
    for name in ('control', 'parcels.worker'):
        import_module(f'celery_couchdb.{name}')


class _Commands(click.Group):
    """A group whose commands are modules of this package, each with a `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f'{__name__}.{cmd_name}').command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from celery.exceptions import ImproperlyConfigured

        from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotFound
        from kombu_couchdb.log import printable

        try:
            return super().invoke(ctx)
        except click.UsageError:
            raise  # it shows what was typed
        except click.ClickException as exc:
            raise click.ClickException(printable(exc.message)) from exc
        except (DatabaseMissing, NotFound) as exc:
            hint = '' if 'couchdb setup' in str(exc) else '; run "celery -A your_app couchdb setup"'
            raise click.ClickException(printable(f'{exc}{hint}')) from exc
        except (CouchDBError, ImproperlyConfigured) as exc:
            raise click.ClickException(printable(str(exc))) from exc


@click.group('couchdb', cls=_Commands, context_settings={'help_option_names': ['-h', '--help']})
def couchdb() -> None:
    """See and mend what is in CouchDB: queues, jobs, dead letters, and the databases themselves."""
