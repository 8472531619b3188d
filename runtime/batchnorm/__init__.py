"""Batch-norm statistics when a batch is split into micro-batches and replicas.

Other buffers and gradients live elsewhere.
"""
