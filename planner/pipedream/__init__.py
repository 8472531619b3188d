"""PipeDream's optimizer: its objective, state space and exact search.

Other objectives live in `solvers`.
"""
