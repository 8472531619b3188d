"""Who may do what: identity, scopes, quotas and the audit log, in front of every route."""
