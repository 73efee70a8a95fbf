"""Workers behind a gateway that accepts tokens only: tokens end, are replaced and are revoked while tasks run."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, wait_for
from tests.tokens import Gateway, TokenServer, token

from .conftest import Site, celery, couchdb, sentence, succeeded


@pytest.fixture
def gateway(site: Site) -> Iterator[Gateway]:
    """A gateway before the server of the site."""
    site.set_up()
    with Gateway(site.server) as gateway:
        yield gateway


def settings(site: Site, gateway: Gateway, secret: str = '', **options: Any) -> dict[str, Any]:
    """Let the site use the gateway, with these options and a secret in the URL; return the settings for workers."""
    site.use(gateway.couchdb_url(site.database, secret), gateway.couchdb_url(site.results))
    for name in ('broker_transport_options', 'result_backend_transport_options'):
        site.app.conf[name] = {**site.app.conf[name], **options}
    return {'broker_transport_options': {**options, 'visibility_timeout': 30.0}}


def run_tasks(site: Site, count: int) -> None:
    sent = [site.send('add', number, 1) for number in range(count)]
    assert [result.get(timeout=PATIENCE) for result in sent] == list(range(1, count + 1))


def secrets(*texts: str) -> set[str]:
    """Return the parts of tokens that must not be shown: whole, and their signatures."""
    return {*texts, *(text.rpartition('.')[2] for text in texts)}


def test_tokens_in_a_file_are_replaced_while_tasks_run(site: Site, gateway: Gateway, tmp_path: Path) -> None:
    """As an agent beside the worker does, such as that of Vault or Kubernetes."""
    file, given, ended = tmp_path / 'token', list[str](), threading.Event()

    def write() -> None:
        while True:
            given.append(token(seconds=6))
            file.with_suffix('.new').write_text(f'{given[-1]}\n')
            file.with_suffix('.new').rename(file)
            if ended.wait(1.0):
                return

    agent = threading.Thread(target=write)
    agent.start()
    try:
        wait_for(file.exists, 'the first token')
        options = settings(site, gateway, auth='jwt', credentials=f'file:{file}')
        worker = site.worker('-l', 'DEBUG', pool='prefork', **options)
        first = len({*gateway.seen})
        while len({*gateway.seen}) < first + 4:
            run_tasks(site, 5)
    finally:
        ended.set()
        agent.join()
    assert {*gateway.seen} <= {*given}
    assert not any(secret in worker.logs() for secret in secrets(*given))
    assert 'Traceback' not in worker.logs()


def test_api_key(site: Site, gateway: Gateway) -> None:
    """Tokens of three seconds, some of them revoked: no task fails, and the key is in no output."""
    key = f'key-{uuid.uuid4().hex}'
    with TokenServer(key, seconds=3.0) as tokens:
        options = settings(site, gateway, key, auth='iam', token_url=tokens.url)
        worker = site.worker('-l', 'DEBUG', pool='prefork', **options)
        run_tasks(site, 5)
        before = len(tokens.given)
        gateway.revoked.update(tokens.given)
        run_tasks(site, 5)
        wait_for(lambda: len(tokens.given) > before + 3, 'renewals')
        run_tasks(site, 5)
        inspect = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1)
        told = [str(answer) for answer in (inspect.stats(), inspect.conf(with_defaults=True), inspect.report())]
        for words in ('report', 'couchdb status --json'):
            done = celery(*words.split(), **site.environment, SETTINGS=json.dumps(options))
            told += [done.stdout, done.stderr]
        told.append(worker.logs())
        assert not any(secret in text for secret in secrets(key, *tokens.given) for text in told)
        assert 'Traceback' not in worker.logs()
        assert {form['apikey'] for form in tokens.requests} == {key}


def test_wrong_key_or_token_ends_a_worker_with_one_sentence(site: Site, gateway: Gateway) -> None:
    with TokenServer() as tokens:
        wrong, expired = f'wrong-{uuid.uuid4().hex}', token(seconds=-10)
        for secret, options, text in (
            (wrong, {'auth': 'iam', 'token_url': tokens.url}, 'refused the API key: Provided API key ** could not be '),
            (expired, {'auth': 'jwt'}, "refused the token of user 'bob': "),
        ):
            worker = site.start(**settings(site, gateway, secret, **options))
            assert worker.container.wait(PATIENCE) != 0
            assert text in worker.logs()
            assert not any(shown in worker.logs() for shown in secrets(secret))


def test_worker_waits_for_a_token(site: Site, gateway: Gateway, tmp_path: Path) -> None:
    """The file has an expired token at first: the worker starts as soon as there is another one."""
    file = tmp_path / 'token'
    file.write_text(token(seconds=-10))
    worker = site.start(**settings(site, gateway, auth='jwt', credentials=f'file:{file}'))
    wait_for(lambda: worker.logs().count('Trying again in') >= 2, 'two attempts to connect')
    assert "refused the token of user 'bob'" in worker.logs()
    file.write_text(token())
    worker.ready()
    run_tasks(site, 3)


def test_commands(site: Site, gateway: Gateway, tmp_path: Path) -> None:
    """Commands use the token of the app, or one of an administrator."""
    file, admin = tmp_path / 'token', token('ann')
    file.write_text(token(seconds=-10))
    settings(site, gateway, auth='jwt', credentials=f'file:{file}')
    assert 'the source of the token is asked for a new one' in sentence(couchdb(site, 'status'))
    assert '"queue"' not in succeeded(couchdb(site, 'status', '--admin', 'ann', COUCHDB_ADMIN_TOKEN=admin))
    assert admin in gateway.seen
    file.write_text(token())
    assert site.results in succeeded(couchdb(site, 'status', '--json'))
    done = succeeded(couchdb(site, 'setup', '--admin', 'ann', COUCHDB_ADMIN_TOKEN=admin))
    assert 'only administrators and members may read and write, among them bob' in done
    assert 'create it in CouchDB' not in done  # a user of tokens needs no document
