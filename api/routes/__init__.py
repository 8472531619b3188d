"""HTTP routes, one file per resource.

A route translates between HTTP and a service; it decides nothing and holds no SQL.
"""
