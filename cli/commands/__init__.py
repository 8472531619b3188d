"""The commands of ``stagewright``, one file each; no command imports another.

Each calls a function users could call themselves. Flags shared by commands live in `options`.
"""
