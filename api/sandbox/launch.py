"""Launcher of a child: ties the process to its parent, then executes the child's command.

``launch.py PARENT_PID COMMAND...``, run by path, with the standard library alone. The
process dies with its parent, writes no core file, is the OOM killer's first choice, and adopts
orphaned descendants.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    if os.getppid() != int(parent):  # the parent ended before prctl, so no signal would come
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
