"""Pages for browsers: HTML routes, sessions, templates and static files.

Only this folder knows browsers; what a page shows comes from `planning`, `jobs` and the store.
"""
