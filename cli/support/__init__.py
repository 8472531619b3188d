"""Helpers that commands call: output, progress, processes and reports.

Nothing here defines a flag or a command.
"""
