"""The additional work of a worker: handing over results, deleting expired ones, remote control, history.

The backend imports it, and the commands when a worker starts.
"""
