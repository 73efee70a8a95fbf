"""Parcels: tasks from publishers without access to the broker's database.

Publishers write parcels into a separate database. A worker checks each parcel and moves it to the broker's database.
`kombu_couchdb.documents.parcel` defines the document. `worker` starts a thread in each worker whose transport has the
option `parcels`; `mover` moves parcels; `check` and `accept` decide which parcels are moved.
"""
