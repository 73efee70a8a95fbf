"""The additional work of a worker: it hands over results, deletes expired ones, moves parcels, and notes history.

It may import `results`, `chords`, `parcels`, `regions` and `patches`. The backend imports it, and the commands when a
worker starts.
"""
