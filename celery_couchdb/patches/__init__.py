"""Functions of Celery that these packages replace or complete: group publishing, next tasks, masks, errors, signals.

Importing a module here changes nothing. The backend and the commands call its functions. It imports no other folder.
"""
