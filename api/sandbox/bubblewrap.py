"""Sandbox by bubblewrap: no network, no other processes, hardly any files, fewer system calls.

Inside are the system's programs, this Python and this package, all read-only, a ``/tmp`` in
memory, and the graphics devices. https://github.com/containers/bubblewrap
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import stagewright

from ...core.errors import Refused
from .seccomp import filter_file

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
CONFIGURED = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
              "/etc/localtime")  # fmt: skip
"""Parts of ``/etc``: how libraries are found and the time zone; no users and no host names."""

KERNEL = ("/proc/sys", "/proc/irq", "/proc/bus")
"""Settings of the kernel, which a new ``/proc`` lets root write, even without capabilities."""

GRAPHICS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
NOBODY = "65534"
TEMPORARY_BYTES = 2**30
CHECKED_WITHIN_S = 20.0

PACKAGES = ("stagewright", "pydantic", "numpy", "torch")
"""Packages a child needs, of those installed."""

FIND_PACKAGES = (
    "import importlib.util as util, sys; "
    "sys.exit(', '.join(name for name in sys.argv[1:] if util.find_spec(name) is None) or 0)"
)
"""Prints the names not found; importing the packages would take seconds."""


@dataclass(frozen=True)
class Sandbox:
    """Command line of bubblewrap; ``readable`` are paths besides the system's programs."""

    program: str
    readable: tuple[str, ...] = ()

    def with_paths(self, paths: Sequence[str]) -> Sandbox:
        """Return a sandbox with further readable paths."""
        return Sandbox(self.program, (*self.readable, *paths))

    def around(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        filter_fd: int | None = None,
    ) -> list[str]:
        """Return the command that runs another one inside, its calls filtered by a file's rules."""
        words = [self.program, "--unshare-all", "--unshare-user", "--disable-userns"]
        words += ["--die-with-parent", "--cap-drop", "ALL", "--uid", NOBODY, "--gid", NOBODY]
        words += ["--hostname", "sandbox", "--clearenv"]
        if filter_fd is not None:
            words += ["--seccomp", str(filter_fd)]
        for name, value in {**environment, "HOME": "/tmp", "TMPDIR": "/tmp"}.items():
            words += ["--setenv", name, value]
        for path in SYSTEM:
            words += _system(path)
        words += ["--proc", "/proc", "--dev", "/dev"]
        for path in KERNEL:
            words += ["--ro-bind-try", path, path]
        for place in ("/tmp", "/dev/shm"):
            words += ["--size", str(TEMPORARY_BYTES), "--tmpfs", place]
        for path in (*CONFIGURED, *self.readable):  # after /tmp, which would hide paths below it
            words += ["--ro-bind-try", path, path]
        devices = [path for pattern in GRAPHICS for path in glob.glob(pattern)]
        for device in devices:
            words += ["--dev-bind", device, device]
        if devices:  # where the driver looks up its devices
            words += ["--ro-bind", "/sys", "/sys"]
        # Last: until here bubblewrap has to create mount points in them.
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
        return [*words, *command]


@cache
def find_sandbox() -> Sandbox:
    """Return a sandbox that was tried and works, or raise `Refused` with what would help."""
    program = shutil.which("bwrap")
    if program is None:
        raise Refused("bubblewrap (bwrap) is not installed; install your system's 'bubblewrap'")
    found = Sandbox(program, tuple(_python()))
    needed = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    try:
        with filter_file() as rules:
            tried = subprocess.run(
                found.around([sys.executable, "-P", "-c", FIND_PACKAGES, *needed], {}, rules),
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=CHECKED_WITHIN_S,
                check=False,
                pass_fds=() if rules is None else (rules,),
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"bubblewrap does not run: {error}") from None
    if tried.returncode:
        raise Refused(_why_not(tried.returncode, tried.stderr.decode("utf-8", "replace")))
    return found


def _why_not(returncode: int, stderr: str) -> str:
    """Explain why a trial child failed, and what would help."""
    said = (stderr.strip().splitlines() or [f"exit code {returncode}"])[-1]
    if not said.startswith("bwrap:"):
        return (
            f"Python does not find packages inside a sandbox: {said}; install everything into one "
            "virtual environment"
        )
    if "execvp" in said:
        return (
            f"the Python at {sys.executable} cannot be run inside a sandbox ({said}); make the "
            "virtual environment with another one"
        )
    if "--disable-userns" in said:
        return f"bubblewrap is older than 0.8 ({said}); install a newer one"
    return (
        f"bubblewrap does not work here: {said}; it needs user namespaces, which this system or "
        "its container does not give"
    )


def _python() -> list[str]:
    """Return the folders of this Python, its packages and this package, parents first."""
    package = Path(stagewright.__file__).parent
    folders = {sys.prefix, sys.base_prefix, str(package)}
    folders |= {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {os.path.realpath(folder) for folder in folders}
    folders |= {str(part.resolve()) for part in package.iterdir() if part.is_symlink()}
    folders |= {str(Path(path).resolve()) for path in _part_paths()}
    links = {link for link in _links(sys.executable) if not _is_below(link, folders)}
    return sorted(folders | links)


def _links(program: str) -> Iterator[str]:
    """Yield a program's path and, link by link, the paths it leads to."""
    while program:
        yield program
        leads = os.readlink(program) if os.path.islink(program) else ""
        program = os.path.normpath(os.path.join(os.path.dirname(program), leads)) if leads else ""


def _is_below(path: str, folders: set[str]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


def _part_paths() -> list[str]:
    """Return the paths of an editable installation, whose parts may lie elsewhere."""
    from ... import core
    from .. import __path__ as api

    return [*api, *core.__path__]


def _system(path: str) -> list[str]:
    """Return the options for a system folder, which may be a link (``/bin`` to ``/usr/bin``)."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind-try", path, path]
