"""Parcels: tasks of publishers who have no right on the broker's database, checked and moved there by a worker.

`kombu_couchdb.documents.parcel` says how one looks. `worker` starts a thread in each worker whose transport has the option
`parcels`; `mover` moves them; `check` and `accept` say which.
"""
