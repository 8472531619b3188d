"""Graphs without code: built again, and measured one layer at a time."""
