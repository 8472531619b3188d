"""Command-line flags that several commands share, and what they parse into.

Nothing here runs a command.
"""
