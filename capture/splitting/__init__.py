"""Tensor parallelism of a captured model: the operations of each layer that ranks can share."""
