"""The patches of Celery: publishing, workers, and the output of errors and settings.

Importing a module here changes nothing. `installation` installs the patches when kombu gets one of our URLs for the
first time; the backend installs some, too. docs/explanation/patches.rst has the reason of each. This folder imports no
other one.
"""
