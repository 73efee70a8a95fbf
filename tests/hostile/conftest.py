"""The number of random examples.

By default there are few, the same in each run. `HOSTILE_EXAMPLES=1000` sets the number, and each run
has other examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tests.integration.conftest import app, connect, connection, mover, mover_app, parcels, sent

__all__ = ['app', 'connect', 'connection', 'mover', 'mover_app', 'parcels', 'sent']

_MANY = os.environ.get('HOSTILE_EXAMPLES')

settings.register_profile(
    'hostile',
    derandomize=not _MANY,
    max_examples=int(_MANY or 25),
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if _MANY else [])],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile('hostile')
