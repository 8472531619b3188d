"""What persists: projects and keys, documents, jobs, and what was already answered.

`contract` says what a store does, `errors` what it raises; `sql_store` is the one that does it,
on SQLite or PostgreSQL. Nothing here imports SQLAlchemy before a store is opened.
"""
