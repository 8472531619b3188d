"""Architectures that people train, in small: what `benchmarks/capture.py` captures."""
