"""Forms of other runtimes' cuts, one file each; `registry.TARGETS` lists them.

Grammars were read in, and checked with, the versions that each `Target` names.
"""
