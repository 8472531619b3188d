"""Captured graphs as data: layers, boundaries, tensors and the operations allowed in them.

It imports no torch; capturing lives in `stagewright.capture`.
"""
