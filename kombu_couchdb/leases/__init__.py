"""Leases: heartbeats, the sweep that releases the messages of expired consumers, and leaders.

It may import `queues`, `documents`, `couchdb` and `design`. `consumer`, `transport` and `admin` import it.
"""
