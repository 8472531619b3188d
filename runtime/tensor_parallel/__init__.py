"""Tensor parallelism: ranks that share the layers of a stage, each with parts of its weights."""
