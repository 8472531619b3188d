"""The GPU check: stages in processes of their own, driven and reported by `scripts/gpu_check`."""
