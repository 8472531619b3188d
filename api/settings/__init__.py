"""Settings of the server: their types, names, sources and checks.

Nothing here acts on a setting.
"""
