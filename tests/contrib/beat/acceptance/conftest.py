"""The fixtures of the acceptance tests."""

from tests.acceptance.conftest import *  # noqa: F403
