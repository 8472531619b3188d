"""What can be asked of a service: each method once, as steps, for both clients."""
