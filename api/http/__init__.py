"""HTTP plumbing that routes share: strict bodies, problem documents, pagination.

No route, no job and no SQL lives here.
"""
