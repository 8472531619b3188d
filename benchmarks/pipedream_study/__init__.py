"""PipeDream's plans on our cluster, priced and written down for `benchmarks/pipedream.py`."""
