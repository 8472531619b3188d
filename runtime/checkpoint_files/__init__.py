"""Checkpoint files: step folders, manifests, checksums and safe reading.

It knows tensors and files, and neither plans nor optimizers.
"""
