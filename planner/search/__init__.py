"""Exact search over chains: branch and bound above label setting.

`arcs` turns cost tables into stage arcs; the rest sees arcs, and no profile, plan or schedule.
"""
