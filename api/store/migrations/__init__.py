"""Migrations from each release's tables to the next one's; alembic reads ``versions``.

A migration is never changed once released, and imports nothing of the tables as they are now.
`upgrade` runs them; a test compares what they make with `tables`.
"""
