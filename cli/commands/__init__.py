"""The commands, one file each.

Each calls a function users could call themselves; flags shared by commands live in `options`.
"""
