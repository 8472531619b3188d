"""Authentication, scopes, quotas and the audit log; of HTTP only the middleware knows anything."""
