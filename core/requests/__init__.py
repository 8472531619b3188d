"""Options and presets of a request, for the command line, the service and Python.

What the service answers lives in `service`.
"""
