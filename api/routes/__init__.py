"""HTTP routes of the API, one file per resource.

A route translates between HTTP and a service. It decides nothing and holds no SQL; pages for
browsers live in `page`.
"""
