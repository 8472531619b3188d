"""Exact search over chains: branch and bound above label setting.

It sees arcs with costs, no profile, no plan and no schedule.
"""
