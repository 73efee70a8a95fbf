"""Leases: heartbeats, other consumers, the sweep of what dead ones held, and a leader where one of many does a job.

It may import `queues`, `documents`, `couchdb` and `design`. `consumer`, `transport` and `admin` import it.
"""
