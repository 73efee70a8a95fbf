"""The fixtures of the hostile tests, and their number of random examples."""

from tests.hostile.conftest import *  # noqa: F403
