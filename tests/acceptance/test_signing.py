"""Signed messages (Celery's `auth` serializer): unsigned and forged ones do not run and become dead letters."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT, items, run_python

from .conftest import Site

x509 = pytest.importorskip('cryptography.x509', reason='Celery needs cryptography to sign')


def certificate(folder: Path, name: str) -> None:
    """Write a key `name.key` and a self-signed certificate `name.pem`."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key, now = rsa.generate_private_key(65537, 2048), datetime.now(timezone.utc)
    who = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    signed = x509.CertificateBuilder(
        who, who, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1)
    ).sign(key, hashes.SHA256())
    (folder / f'{name}.pem').write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / f'{name}.key').write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """The settings of an app that signs its messages, and trusts the certificates in the folder `trusted`."""
    trusted = tmp_path / 'trusted'
    trusted.mkdir()
    certificate(trusted, 'shop')
    return {
        'security_key': str(trusted / 'shop.key'),
        'security_certificate': str(trusted / 'shop.pem'),
        'security_cert_store': str(trusted / '*.pem'),
        'security_digest': 'sha256',
        'task_serializer': 'auth',
        'event_serializer': 'auth',
        'accept_content': ['auth'],
        'result_serializer': 'json',
        'result_accept_content': ['json'],
    }


@pytest.fixture
def sign(site: Site, settings: dict[str, Any]) -> Callable[..., str]:
    """A function that publishes a signed `add(x, 1)` from another process, and returns the task id."""

    def sign(x: int, *, wait: bool = False, **other: str) -> str:
        done = run_python(
            f"""
from tests.acceptance.app import add
result = add.delay({x}, 1)
print(result.id, result.get(timeout={PATIENCE}) if {wait} else None)
""",
            SETTINGS=json.dumps({**settings, **other}),
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
            **site.environment,
        )
        task_id, result = done.stdout.split()
        assert result == (str(x + 1) if wait else 'None')
        return task_id

    return sign


def change_body(client: Client, change: Callable[[bytes], bytes]) -> None:
    """Change the body of a waiting message."""
    [item] = items(client)
    message = item['message']
    message['body'] = b64encode(change(b64decode(message['body']))).decode()
    client.put(item)


def test_signed_tasks_run_and_others_become_dead_letters(
    site: Site, settings: dict[str, Any], sign: Callable[..., str], client: Client, tmp_path: Path
) -> None:
    changed = sign(1)
    change_body(client, lambda body: body.replace(b'[[1, 1]', b'[[9, 9]'))
    certificate(tmp_path, 'stranger')
    stranger = sign(2, security_key=str(tmp_path / 'stranger.key'), security_certificate=str(tmp_path / 'stranger.pem'))
    unsigned = site.send('add', 3, 1).id
    worker = site.worker('-E', concurrency=1, **settings)
    wait_for(lambda: dead.count(client) == 3, 'three dead letters')
    reasons = {doc['message']['headers']['id']: doc['reason'] for doc in items(client)}
    assert 'cannot be decoded' in reasons[changed]
    assert 'cannot be decoded' in reasons[stranger]
    assert 'untrusted content of type json' in reasons[unsigned]
    for task_id in (changed, stranger, unsigned):
        assert not site.app.AsyncResult(task_id).ready()
    site.app.control.shutdown()  # which is not signed
    refusal = "Can't decode message body: ContentDisallowed"
    wait_for(lambda: refusal in worker.logs(), 'the command to be refused')
    sign(4, wait=True)
