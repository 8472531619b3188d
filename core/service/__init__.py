"""What the service answers, read alike by the server that says it and the client that hears it."""
