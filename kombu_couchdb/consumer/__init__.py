"""The I/O thread of a consuming connection: it claims messages and writes what kombu decides about them.

It may import `leases`, `queues`, `documents`, `couchdb` and `design`, but none of kombu's classes. `transport` imports
it.
"""
