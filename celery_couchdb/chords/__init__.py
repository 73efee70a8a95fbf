"""Chords: their parts are counted, and their bodies are sent once.

It may import `results` and `waiting`. The backend imports it.
"""
