"""Persistence on SQLite or PostgreSQL: projects, keys, documents, jobs, answers, the audit log.

It knows neither HTTP nor how jobs run; SQL stands here and nowhere else.
"""
