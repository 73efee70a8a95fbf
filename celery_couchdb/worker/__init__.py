"""What a worker does in addition to running tasks: it hands over results, deletes expired ones, and notes history.

It may import `results`, `chords`, `parcels` and `regions`. The backend imports it, and the commands when a worker
starts.
"""
