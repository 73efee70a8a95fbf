"""What operators see and change, as data: the commands print it, and the page renders it.

A module for each kind of thing. None of them prints, and none knows a command or the page.
"""
