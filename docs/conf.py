"""How Sphinx makes the documentation: `make docs`."""

from __future__ import annotations

import kombu_couchdb

project = 'celery-couchdb'
author = 'the maintainers of celery-couchdb'
release = version = kombu_couchdb.__version__

extensions = ['sphinx.ext.autodoc', 'sphinx_click']
html_theme = 'furo'
html_title = f'{project} {release}'
#: What stands in `backticks` is code, in docstrings as here.
default_role = 'code'
#: Two hyphens before an option are two hyphens.
smartquotes = False

autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True}
#: All that is ours must be found; what Python, kombu and Celery document is elsewhere.
nitpicky = True
# Other projects' names, and type variables, have no page.
nitpick_ignore_regex = [('py:.*', r'(?!kombu_couchdb|celery_couchdb).*'), ('py:class', r'.*\._\w+')]
