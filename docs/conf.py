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
#: What a page names of the documented modules must be found.
nitpicky = True
# Neither other projects' names, nor type variables, nor our classes that only an annotation names have a page.
nitpick_ignore_regex = [
    ('py:.*', r'(?!celery_couchdb|kombu_couchdb\.(errors|unique|admin\.queues)).*'),
    ('py:class', r'.*\._\w+'),
]
