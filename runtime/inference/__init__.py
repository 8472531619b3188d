"""Forwards alone, with many requests in flight: as soon as a stage is free it takes the next."""
