"""Functions of Celery that these packages replace or complete: group publishing, next tasks, masks, errors, signals.

Importing a module here changes nothing but the aliases of our schemes. With the first connection to CouchDB,
`registration` calls the functions of the others; the backend and the commands call some, too. This folder imports no
other one.
"""
