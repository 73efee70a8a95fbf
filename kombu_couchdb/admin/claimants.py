"""The consumers that have claimed jobs, by their heartbeats: which worker each is, and which tasks it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..documents.ids import CONSUMER
from ..leases.lease import ends_at
from ..leases.worker_load import reported


class Claimants:
    """The heartbeats of some consumers."""

    def __init__(self, heartbeats: Iterable[Document], now: float) -> None:
        """`now` is the server's time: a consumer whose lease has ended reports nothing."""
        self._heartbeats = {doc['_id']: doc for doc in heartbeats if doc.get('type') == 'Consumer'}
        self._running = {
            doc_id: {task['id'] for task in reported(doc)}
            for doc_id, doc in self._heartbeats.items()
            if ends_at(doc, holds=True) > now
        }

    @classmethod
    def of(cls, client: Client, docs: Iterable[Document]) -> Claimants:
        """Read the heartbeats of the consumers that have claimed these items; one request, or none."""
        ids = sorted({by for doc in docs if (by := workitem.claimant(doc)) and by.startswith(CONSUMER)})
        return cls((doc for doc in client.find(ids) if doc) if ids else (), client.clock.now())

    @classmethod
    def all(cls, client: Client) -> Claimants:
        """Read the heartbeats of all consumers; one request."""
        return cls((row['doc'] for row in client.id_range(CONSUMER, docs=True)), client.clock.now())

    @property
    def ids(self) -> Collection[str]:
        """The ids of the heartbeat documents."""
        return self._heartbeats.keys()

    def state(self, doc: Document, now: float) -> str:
        """Return the state of an item, see `jobs.STATES`: a claimed one runs if the heartbeat names its task."""
        found = workitem.state(doc, now)
        if found == 'prefetched' and workitem.task_id(doc) in self._running.get(workitem.claimant(doc) or '', ()):
            return 'running'
        return found

    def name(self, consumer: str) -> str:
        """Return the node name of a consumer if it is known to be a Celery worker, else its host and process id."""
        doc = self._heartbeats.get(consumer)
        return name_of(doc) if doc else host_and_process(consumer)


def name_of(doc: Document) -> str:
    """Return the node name of the Celery worker that writes a heartbeat, or else its host and process id."""
    worker = doc.get('worker')
    return worker if isinstance(worker, str) and worker else host_and_process(doc['_id'])


def host_and_process(consumer: str) -> str:
    """Return what the id of a consumer, or the holder of a lead, says: host and process id."""
    return consumer.removeprefix(CONSUMER).rpartition(':')[0] or consumer
