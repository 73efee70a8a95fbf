"""The patches of Celery: publishing, masks of passwords, errors, and signals of workers.

Importing a module here changes nothing. `installation` installs the patches when kombu gets one of our URLs for the
first time; the backend installs some, too. docs/explanation/patches.rst has the reason of each. This folder imports no
other one.
"""
