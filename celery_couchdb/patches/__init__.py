"""Functions of Celery that these packages replace or complete: group publishing, next tasks, masks, error output.

Importing a module here changes nothing: `celery_couchdb.registration`, the backend and the commands call its functions.
It imports no other folder.
"""
