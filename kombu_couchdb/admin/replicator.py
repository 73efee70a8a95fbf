"""Settings of CouchDB's replicator that regions need, on each node of the server.

* After a failure the replicator waits 30 seconds before it tries a replication again, after the next one a minute, and
  so on up to eight hours. It computes the wait from the events that it remembers of a replication: with two events the
  wait is always 30 seconds, see `max_history` in CouchDB's documentation. Every `interval` it looks for replications
  whose wait is over.
* Without further settings it accepts every TLS certificate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from urllib.parse import quote

from ..couchdb.client import Client
from ..couchdb.shapes import items, members, text
from ..errors import AccessDenied, ConfigurationError, describe_user
from .setup import Step

__all__ = ['BOUNDED', 'Nodes']

#: The settings that bound the wait: the number of events, and milliseconds.
BOUNDED = {'max_history': '2', 'interval': '5000'}

_VERIFY, _TRUSTED = 'verify_ssl_certificates', 'ssl_trusted_certificates_file'

#: Addresses at which a node also listens on the loopback interface, and the host in its URL there.
_LOOPBACK = {'127.0.0.1': '127.0.0.1', '0.0.0.0': '127.0.0.1', 'any': '127.0.0.1', '::': '127.0.0.1', '::1': '[::1]'}


class Nodes:
    """The nodes of a server, with the rights of a server administrator. *Raises* `AccessDenied` without them."""

    def __init__(self, server: Client) -> None:
        """Read the settings of all nodes; `server` is a client for the server, see `Address.root`.

        *Raises* `ConfigurationError` for the embedded server.
        """
        self._server = server
        if 'couchdb' not in server.welcome():
            raise ConfigurationError(
                f'{server.address.server} is the embedded server, which has no replicator that reaches other servers: '
                f'regions need Apache CouchDB'
            )
        try:
            names = server.request('GET', '/_membership', repeat=True, shape=members(cluster_nodes=items(text)))
            self.settings = {name: self._read(name, 'replicator') for name in sorted(names['cluster_nodes'])}
            self._listening = [self._read(name, 'chttpd') for name in self.settings]
        except AccessDenied as exc:
            raise AccessDenied(
                f'{server.address.server}: {describe_user(server.user)} may not read and change the settings of the '
                f'replicator; name an administrator of CouchDB with --admin'
            ) from exc

    def own_url(self) -> str:
        """Return the URL at which each node reaches itself, or that of the app if nodes differ.

        A node listens without TLS on its loopback interface, unless its configuration says otherwise. So replications
        do not depend on the way on which workers reach the server, such as a proxy or a name.
        """
        urls = {
            f'http://{_LOOPBACK[host]}:{node.get("port", "5984")}'
            if (host := node.get('bind_address', '127.0.0.1')) in _LOOPBACK
            else ''
            for node in self._listening
        }
        [url, *others] = sorted(urls)
        return url if url and not others else self._server.address.server

    def plan(self, *, verify: bool, trusted: str | None) -> Iterator[Step]:
        """Yield the steps that change settings of the nodes.

        With `verify`, certificates are verified. `trusted` is the path of a file with the certificates of CAs, on the
        machines of the nodes; None keeps the setting. *Raises* `ConfigurationError` if replication is switched off, or
        if certificates cannot be verified because no file is known.
        """
        for name, node in self.settings.items():
            if 'http' not in node.get('valid_endpoint_protocols', 'http'):
                raise ConfigurationError(
                    f'{self._server.address.server}: replication is switched off, by the setting '
                    f'"[replicator] valid_endpoint_protocols" of node {name}: set it to "http,https"'
                )
        for setting, value in BOUNDED.items():
            given = {node[setting] for node in self.settings.values() if setting in node}
            if given - {value}:
                text = (
                    f'[replicator] {setting} is {", ".join(sorted(given))} and stays so; with {value}, regions that '
                    f'were cut off catch up within 40 seconds'
                )
                yield Step(text, notice=True)
            else:
                yield self._setting(setting, value)
        if verify:
            if not trusted and not all(_TRUSTED in node for node in self.settings.values()):
                raise ConfigurationError(
                    'other regions are reached by TLS, but CouchDB knows no file with certificates to verify theirs: '
                    'name the file on its machines with --trusted-certificates, for example '
                    '/etc/ssl/certs/ca-certificates.crt, or write ?ssl_cert_reqs=none into the URLs of the regions'
                )
            if trusted:
                yield self._setting(_TRUSTED, trusted)
            yield self._setting(_VERIFY, 'true')

    def _setting(self, setting: str, value: str) -> Step:
        nodes = [name for name, node in self.settings.items() if node.get(setting) != value]
        return Step(
            f'[replicator] {setting} is {value}, for all replications of the server',
            partial(self._write, setting, value, nodes) if nodes else None,
        )

    def _read(self, node: str, section: str) -> Mapping[str, str]:
        found: Mapping[str, str] = self._server.request(
            'GET', f'/_node/{quote(node)}/_config/{section}', repeat=True, shape=members()
        )
        return found

    def _write(self, setting: str, value: str, nodes: list[str]) -> None:
        for node in nodes:
            self._server.request('PUT', f'/_node/{quote(node)}/_config/replicator/{setting}', body=value)
