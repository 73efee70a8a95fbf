"""What a worker does in addition to running tasks: it hands over results, deletes expired ones, and notes history.

It may import `results` and `chords`. The backend imports it; the commands import it when a worker starts.
"""
