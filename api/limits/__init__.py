"""Limits on what clients use at once: turns to work, and shares of memory and streams."""
