"""Give memory and values to a model built on the meta device, each rank its own part.

Checkpoints of training runs live in `checkpoint`.
"""
