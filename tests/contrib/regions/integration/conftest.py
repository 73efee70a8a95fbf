"""The fixtures of the integration tests."""

from tests.integration.conftest import *  # noqa: F403
