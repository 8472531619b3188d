"""HTTP plumbing that routes share: strict bodies, problem documents, pagination; no routes."""
