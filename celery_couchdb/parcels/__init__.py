"""Parcels: tasks from publishers without access to the broker's database.

Publishers write parcels into a separate database. A worker checks each parcel and moves it to the broker's database.
`kombu_couchdb.documents.parcel` defines the document. `thread` runs in each worker whose transport has the option
`parcels`; `mover` moves parcels; `check` and `accept` decide which parcels are moved. A parcel of a program without
Celery becomes a receipt, into which `receipts` writes how the task ended.
"""
