"""Stages in one process: micro-batches in clock order over one or several devices."""
