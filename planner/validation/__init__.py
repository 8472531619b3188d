"""Independent second computation of every number in a plan, in plain loops.

It shares no code with `cost`, `search`, `heuristics` or `solvers`, on purpose, and repeats even
their constants: a mistake in one of the two then shows up as a difference. Only the schedules and
the simulator are common ground. Keep it that way when two formulas here look like duplicates.
"""
