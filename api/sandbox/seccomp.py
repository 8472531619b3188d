"""System calls that a sandboxed child may not make, as a filter for the kernel.

bubblewrap takes a seccomp filter as the classic BPF program that the kernel runs before each call
(https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html). The list is that of what
containers deny by default (https://docs.docker.com/engine/security/seccomp/) as far as neither
Python nor torch nor CUDA calls it: what changes mounts, namespaces, modules, clocks and keys, what
reads other processes, and young interfaces in which holes were found. A library that builds such
programs (libseccomp) would have to be installed with the system; the numbers never change.
"""

from __future__ import annotations

import errno
import platform
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CALLS: dict[str, tuple[int, int]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "lookup_dcookie": (212, 18),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "name_to_handle_at": (303, 264), "nfsservctl": (180, 42), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58), "vmsplice": (278, 75),
}  # fmt: skip
"""Numbers on x86-64 and on 64-bit Arm of calls that fail with ``EPERM``."""

CLONE3 = 435
"""Its flags lie in memory, where no filter can look; without it, the C library takes `CLONE`."""

CLONE, SOCKET, IOCTL = (56, 220), (41, 198), (16, 29)
NEW_NAMESPACES = 0x7E020000
"""``CLONE_NEW*``: cgroup, uts, ipc, user, pid, net, and mount (0x20000)."""

FAMILIES = (1, 2, 10, 16)
"""``AF_UNIX``, ``AF_INET``, ``AF_INET6``, ``AF_NETLINK``. Others, such as ``AF_VSOCK``, need not
belong to the network namespace, and many have been holes."""

TYPED = (0x5412, 0x541C)
"""``TIOCSTI`` and ``TIOCLINUX``, which type into the terminal that the server was started from."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `CALLS`, and the kernel's ``AUDIT_ARCH``."""

X32 = 0x40000000
"""Calls of the x32 ABI have this bit: the same calls under other numbers."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, (16, 24)  # in struct seccomp_data; little-endian
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, if false, and operand, as in ``struct sock_filter``."""


@contextmanager
def filter_file() -> Iterator[int | None]:
    """Yield the descriptor of a file with this machine's filter; `None` if there is no filter."""
    program = build_filter()
    if program is None:
        yield None
        return
    # A file of its own for each child: those that share one share the place they read at.
    with tempfile.TemporaryFile() as file:
        file.write(program)
        file.seek(0)
        yield file.fileno()


def build_filter(machine: str = "") -> bytes | None:
    """Return the filter for a machine, this one by default; `None` if its numbers are not known."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    column, architecture = known
    denied, unknown = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls on a 64-bit kernel have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32),
        (_RETURN, 0, 0, denied),
    ]
    for numbers in CALLS.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, denied)]
    program += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, unknown)]
    program += [
        (_EQUAL, 0, 4, CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT[0]),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (_RETURN, 0, 0, denied),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program += [(_EQUAL, 0, len(FAMILIES) + 3, SOCKET[column]), (_LOAD, 0, 0, _ARGUMENT[0])]
    # The last test falls through to the refusal, each hit skips to what comes after it.
    program += [
        (_EQUAL, len(FAMILIES) - position, 0, family) for position, family in enumerate(FAMILIES)
    ]
    program += [(_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 4, IOCTL[column]), (_LOAD, 0, 0, _ARGUMENT[1])]
    program += [(_EQUAL, 1, 0, TYPED[0]), (_EQUAL, 0, 1, TYPED[1]), (_RETURN, 0, 0, denied)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
