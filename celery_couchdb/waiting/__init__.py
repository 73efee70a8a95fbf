"""Waiting for results: `get` and `join`, one subscriber of the feed of changes for all of a process, and callbacks.

It may import `results`. The backend and `chords` import it.
"""
