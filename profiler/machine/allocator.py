"""Let the C allocator keep freed memory, as CUDA's caching allocator does."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Stop glibc from handing freed tensors back to the system; return False without glibc.

    By default each allocation of more than a few megabytes is mapped afresh and its pages are
    zeroed by the kernel at first touch, in every step. For the rest of this process, memory once
    taken is used again. Meant for programs that own their process, such as training workers.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26))
    return all(mallopt(name, value) for name, value in settings)
