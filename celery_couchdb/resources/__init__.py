"""Resources of operators as data: the commands print them, and the page renders them.

There is a module for each kind of resource. None of them prints, and none knows a command or the page.
"""
