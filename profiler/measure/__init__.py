"""Measure a model with its code, layer by layer and as a whole.

Graphs without code are measured in `graphs`.
"""
