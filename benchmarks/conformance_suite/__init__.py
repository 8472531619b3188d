"""Cells of the conformance table, run by `benchmarks/conformance.py` on ours and on torch's."""
