"""What a server tells about itself while it runs: its log, its metrics, its traces."""
