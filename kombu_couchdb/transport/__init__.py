"""kombu's contract: connections, channels, acknowledgements and batches, built on the other folders.

It may import every other folder but `admin` and `embedded`. Nothing but kombu, Celery's side and tests import it.
"""

from .collector import CollectingProducer
from .connection import Transport
from .taker import taken_by

__all__ = ['CollectingProducer', 'Transport', 'taken_by']
