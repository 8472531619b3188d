"""Functions that commands call: documents, services, child processes, output and reports.

Nothing here defines a flag or a command.
"""
