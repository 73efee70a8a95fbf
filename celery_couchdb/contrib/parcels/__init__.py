"""Parcels: tasks from publishers without access to the broker's database.

Publishers write parcels into a separate database. A worker checks each parcel and moves it to the broker's database.
`kombu_couchdb.contrib.parcels.parcel` defines the document. One of the workers whose transport has the option
`parcels` moves parcels (`mover`); `parcel_checks` decides which. A parcel of a program without Celery becomes a
receipt, into which `receipts` writes how the task ended.
"""
