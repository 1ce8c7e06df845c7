"""Restricts a child process: it ends with its parent, and its memory is limited.

A decoder's process also loses access to everything that decoding does not need: privileges, files, sockets, programs,
other processes.

It can only use the memory and descriptors it already has. This also applies to code that a hostile image makes it run:
the kernel enforces these limits, and the process cannot lift them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522
_CLONE_THREAD = 0x10000

# Numbers of system calls on x86-64, the only machine on which links work.
_ALLOWED = {
    "futex": 202,
    "mmap": 9,
    "munmap": 11,
    "madvise": 28,
    "mprotect": 10,
    "mremap": 25,
    "brk": 12,
    "getrusage": 98,
    "setrlimit": 160,
    "getrlimit": 97,
    "clock_gettime": 228,
    "read": 0,
    "write": 1,
    "writev": 20,
    "close": 3,
    "lseek": 8,
    "fstat": 5,
    "poll": 7,
    "ppoll": 271,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "sigaltstack": 131,
    "sched_yield": 24,
    "sched_getaffinity": 204,
    "nanosleep": 35,
    "clock_nanosleep": 230,
    "clock_getres": 229,
    "gettimeofday": 96,
    "times": 100,
    "uname": 63,
    "sysinfo": 99,
    "getpid": 39,
    "gettid": 186,
    "getcpu": 309,
    "getrandom": 318,
    "membarrier": 324,
    "rseq": 334,
    "set_robust_list": 273,
    "restart_syscall": 219,
    "exit": 60,
    "exit_group": 231,
}
_AUDIT_ARCH = 0xC000003E
_TGKILL, _PRLIMIT64, _CLONE, _CLONE3, _SECCOMP = 234, 302, 56, 435, 317

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def end_with_parent(parent: int) -> None:
    """Let the system kill this process, stopped or not, when the thread that started it ends.

    NOTE: the thread, not the process. ``parent`` is the process id of the starting process, which may already be gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def limit_memory(mebibytes: int) -> None:
    """Limit this process to its current address space plus ``mebibytes``; ``OSError`` if not on Linux."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    lower(resource.RLIMIT_AS, pages * resource.getpagesize() + mebibytes * 2**20)


def lower(kind: int, limit: int) -> None:
    """Lower a limit of this process permanently, unless it is already lower."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def confine(keep: Iterable[int]) -> bool:
    """Close every descriptor but ``keep`` and drop all rights; returns whether the kernel filters system calls, too.

    Raises ``OSError`` if the system refuses any other step.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # if memory runs out, the system kills this process first
    libc = ctypes.CDLL(None, use_errno=True)
    _drop_capabilities(libc)  # before files are limited, as it may have to read one
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the list's own descriptor is already closed
                os.close(int(name))
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, max(kept) + 1),
    ):
        lower(kind, limit)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        _check(libc.prctl(option, value, 0, 0, 0))
    return _filter_calls(libc)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities, even for root."""
    if libc.capset(struct.pack("<Ii", _CAPABILITY_VERSION, 0), bytes(24)) == 0:
        return
    with open("/proc/self/status", encoding="ascii") as file:
        permitted = next(line.split()[1] for line in file if line.startswith("CapPrm:"))
    _check(int(permitted, 16))  # usually, a system that refuses even this call gives a service nothing to drop


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Refuse every system call not listed above with ``EPERM``, on all threads; ``False`` if that is not possible."""
    program = b"".join(_program())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    all_threads = 1
    return bool(libc.syscall(_SECCOMP, 1, all_threads, header) == 0)


def _program() -> list[bytes]:
    refuse = _op(_RETURN, _ERRNO | errno.EPERM)
    lines = [
        _op(_LOAD, _ARCHITECTURE_AT),
        _op(_EQUAL, _AUDIT_ARCH, yes=1, no=0),
        refuse,
        _op(_LOAD, _NUMBER_AT),
    ]
    for number in _ALLOWED.values():
        lines += [_op(_EQUAL, number, yes=0, no=1), _op(_RETURN, _ALLOW)]
    # Signals (abort() sends them) and limits only for itself; clone only for threads.
    for number, test, value in (
        (_TGKILL, _EQUAL, os.getpid()),
        (_PRLIMIT64, _EQUAL, 0),
        (_CLONE, _ANY_BIT, _CLONE_THREAD),
    ):
        lines += [
            _op(_EQUAL, number, yes=0, no=4),
            _op(_LOAD, _ARGUMENT_AT),
            _op(test, value, yes=0, no=1),
            _op(_RETURN, _ALLOW),
            refuse,
        ]
    # A filter cannot read the flags of clone3; the C library uses the older call if clone3 is missing.
    lines += [_op(_EQUAL, _CLONE3, yes=0, no=1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    return [*lines, refuse]


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("@HBBI", code, yes, no, value)


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
