"""Create the CouchDB user of the workers, or give it a new password. It needs an administrator, and is run once.

`COUCHDB_URL` is the server, such as `http://couchdb:5984`. `COUCHDB_ADMIN` and `COUCHDB_ADMIN_PASSWORD` are the name
and password of an administrator. `COUCHDB_USER` and `COUCHDB_PASSWORD_FILE` are those that the workers have.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote

import requests


def main() -> None:
    """Wait until the server answers, for a minute at most, and write the user's document."""
    name = os.environ['COUCHDB_USER']
    password = Path(os.environ['COUCHDB_PASSWORD_FILE']).read_text('utf-8').rstrip('\r\n')
    server = os.environ['COUCHDB_URL'].rstrip('/')
    session = requests.Session()
    session.auth = (os.environ['COUCHDB_ADMIN'], os.environ['COUCHDB_ADMIN_PASSWORD'])
    deadline = time.monotonic() + 60
    while True:
        try:
            session.get(f'{server}/_up', timeout=5).raise_for_status()
            break
        except requests.RequestException:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    # A CouchDB whose setup was not finished lacks this database. 412 says that it exists.
    created = session.put(f'{server}/_users', timeout=10)
    if created.status_code != 412:
        created.raise_for_status()
    url = f'{server}/_users/org.couchdb.user:{quote(name, safe="")}'
    found = session.get(url, timeout=10)
    revision = {'_rev': found.json()['_rev']} if found.ok else {}
    user = {'name': name, 'password': password, 'roles': [], 'type': 'user', **revision}
    session.put(url, json=user, timeout=10).raise_for_status()


if __name__ == '__main__':
    main()
