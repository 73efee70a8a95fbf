"""`examples/deployment` on a server with users: a user is created, becomes a member, and gets a new password."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import requests

from celery_couchdb.testing import Server
from tests.conftest import Users
from tests.support import ROOT

FOLDER = ROOT / 'examples/deployment'


def test_user_is_created_and_becomes_a_member(
    server: Server, database: str, users: Users, apache_couchdb: bool, tmp_path: Path
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has one user')
    name, secret = f'shop-{uuid.uuid4().hex[:12]}', tmp_path / 'password'
    users(name, 'is replaced')
    host = f'{server.host}:{server.port}'
    url = f'http://{host}'
    environment = {
        **os.environ,
        'CELERY_BROKER_URL': f'couchdb://{host}/{database}',
        'CELERY_RESULT_BACKEND': f'couchdb://{host}/{database}',
        'COUCHDB_URL': url,
        'COUCHDB_ADMIN': server.user,
        'COUCHDB_ADMIN_PASSWORD': server.password,
        'COUCHDB_USER': name,
        'COUCHDB_PASSWORD_FILE': str(secret),
        'PYTHONPATH': str(ROOT),
    }
    for password in ('first\n', 'second'):
        secret.write_text(password)
        for command in ('create_user.py', f'-m celery -A shop couchdb setup --admin {server.user}'):
            subprocess.run([sys.executable, *command.split()], cwd=FOLDER, env=environment, check=True, timeout=120)
        asked = requests.get(f'{url}/{database}', auth=(name, password.strip()), timeout=10)
        assert asked.ok
    status = ['-m', 'celery', '-A', 'shop', 'couchdb', 'status']
    subprocess.run([sys.executable, *status], cwd=FOLDER, env=environment, check=True)
