"""kombu's contract: connections, channels, acknowledgements and batches, built on the other folders.

It may import every other folder but `admin` and `embedded`. Nothing but kombu, Celery's side and tests import it.
"""

from .batches import CollectingProducer, taken_by
from .connection import Transport

__all__ = ['CollectingProducer', 'Transport', 'taken_by']
