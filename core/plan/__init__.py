"""Plans: stages, schedules, timelines, explanations and assumptions.

Making a plan lives in `stagewright.planner`.
"""
