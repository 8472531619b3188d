"""Saving a training run so that a crash loses nothing, and resuming it under any plan."""
