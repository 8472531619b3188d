"""Links between ranks: measured, and fitted into a cluster.

Measuring layers lives in `measure`.
"""
