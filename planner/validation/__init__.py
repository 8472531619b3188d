"""Reference computations that check a finished plan.

On purpose they share no code with `cost`, `search` or `solvers`.
"""
