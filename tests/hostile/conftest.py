"""The fixtures of the hostile tests are those of the integration tests."""

from tests.integration.conftest import app, connect, connection, mover, mover_app, parcels, sent

__all__ = ['app', 'connect', 'connection', 'mover', 'mover_app', 'parcels', 'sent']
