"""Checkpoints of training runs: crash-safe saving, and resuming under any plan."""
