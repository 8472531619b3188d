"""Jobs: what takes long is queued in the store, run by workers, and watched by the server."""
