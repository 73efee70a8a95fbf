"""Waiting for results: `get` and `join`, callbacks, and one subscriber to the changes feed for the whole process.

It may import `results`. The backend and `chords` import it.
"""
