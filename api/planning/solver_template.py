"""Imports of the process that solver processes are forked from: each then begins with them.

They take two seconds; a fork takes none, and shares the memory.
"""

from __future__ import annotations

from ...planner import numba_cache
from . import decision as decision

if numba_cache.is_done():
    numba_cache.load_common()
