"""The histogram of request durations (`kombu_couchdb.couchdb.latency`)."""

from __future__ import annotations

import json
import os

import pytest

from kombu_couchdb.couchdb.latency import Latency


def test_durations_are_counted_in_buckets() -> None:
    latency = Latency()
    for seconds in (0.001, 0.005, 0.0051, 0.3, 60.0):
        latency.note(seconds)
    latency.note_failure()
    found = latency.snapshot()
    assert (found['count'], found['failed']) == (5, 1)
    assert found['seconds'] == pytest.approx(60.3111)
    assert found['buckets'] == {
        '0.005': 2,
        '0.01': 3,
        '0.025': 3,
        '0.05': 3,
        '0.1': 3,
        '0.25': 3,
        '0.5': 4,
        '1': 4,
        '2.5': 4,
        '5': 4,
        '+Inf': 5,
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_forked_child_begins_anew_even_if_the_lock_was_held() -> None:
    latency = Latency()
    latency.note(1.0)
    with latency._lock:
        child = os.fork()
        if not child:
            latency.note(0.1)
            os._exit(latency.snapshot()['count'])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
