"""An app whose workers and publishers get tokens from an identity provider (OpenID Connect)."""

from __future__ import annotations

import os

import requests
from celery import Celery

app = Celery('shop')
app.conf.broker_transport_options = {'auth': 'jwt', 'credentials': 'shop:token'}


def token() -> str:
    """Return a new token for this program (OAuth 2, the client credentials grant)."""
    response = requests.post(
        os.environ['OIDC_TOKEN_URL'],
        auth=(os.environ['OIDC_CLIENT_ID'], os.environ['OIDC_CLIENT_SECRET']),
        data={'grant_type': 'client_credentials'},
        timeout=10,
    )
    response.raise_for_status()
    return str(response.json()['access_token'])


@app.task
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y
