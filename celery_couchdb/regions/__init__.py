"""Regions: tasks that run in another CouchDB, and their results on the way back.

`kombu_couchdb.transport.other_regions` publishes a task for another region as a parcel, which CouchDB replicates.
`ferry` publishes the parcels that arrive, and `home` lets the tasks that a task sends, and the results, find the way
back to the region where the first task was sent.
"""
