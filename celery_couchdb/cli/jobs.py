"""The commands `celery couchdb jobs`: list and show jobs, and change them by id or by filter."""

from __future__ import annotations

from typing import Any

import click

from kombu_couchdb.admin.listing import listing

from ..resources.job_actions import JOBS, wanted_jobs
from ..resources.jobs import job_resource
from .clients import jobs_of
from .failures import show_command
from .resource_commands import action_command, field_options, given, json_option, limit_option, print_list


@click.group('jobs')
def command() -> None:
    """List, show, move, edit or remove jobs."""


@command.command('list')
@field_options(JOBS.filters)
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, /, limit: int, as_json: bool, **options: Any) -> None:
    """List jobs.

    Those that workers hold come first, by the time of the claim, then those of each queue, by state and time. With
    --task, --since, --args or the state "done", the latest come first.
    """
    jobs, values = jobs_of(ctx), given(JOBS.filters, options)
    empty = JOBS.no_match(values) if values else 'There are no jobs that wait or run.'
    empty += '' if 'state' in values else ' Dead and done jobs are listed with --state only.'
    found = listing(jobs.client, wanted_jobs(jobs, values), limit + 1)
    print_list(job_resource(jobs), found, as_json, empty=empty, limit=limit)


command.add_command(show_command)
for action in JOBS.actions:
    command.add_command(action_command(JOBS, action, jobs_of))
