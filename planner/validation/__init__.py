"""Independent second computation of every number in a plan, in plain loops.

It shares no code with `cost`, `search`, `heuristics` or `solvers`, on purpose, and repeats even
their constants: a mistake in one shows up as a difference. The two share only the schedules, the
simulator and the lifetimes of skip tensors (`dag.reorder`). Do not merge formulas that look alike.
"""
