"""Requests about messages, queues, exchanges, bindings and broadcasts.

It may import `documents`, `couchdb` and `design`. `leases`, `consumer`, `transport` and `admin` import it.
"""
