"""Isolation: what a Linux process can be forbidden, with ctypes alone and without root.

A guarantee is made of mechanisms. Each is tried in a throw-away fork, because whether it works
depends on the kernel, on the container and on the user, and the only safe test is to try:

    network    seccomp refuses sockets and io_uring; an empty network namespace where allowed
    files      Landlock, else a read-only view: the interpreter's folders, one private directory;
               seccomp refuses to change files that one owns (chmod, utime, ...)
    signals    seccomp: kill only oneself; a PID namespace a call
    memory     RLIMIT_AS, with fork refused
    time       the parent reads the child's CPU clock; RLIMIT_CPU behind it
    processes  seccomp: only threads may be cloned
    disk       a tmpfs of fixed size; elsewhere only RLIMIT_FSIZE, which is per file
    leftovers  no fork; a PID namespace; what still gets away is killed by the zygote

Root in a container without CAP_SYS_ADMIN has all but `disk`; an ordinary user has all where user
namespaces are allowed. Not here: cgroups (rarely writable), other uids (they could not read an
interpreter in /root). Outside Linux there is nothing but resource limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from pathlib import Path

LAYERS = {  # guarantee: what gives it, alternatives in order
    "network": ("seccomp+net", "seccomp"),
    "files": ("landlock+seccomp", "mount"),
    "signals": ("seccomp+pid", "seccomp", "pid"),
    "memory": ("limits+seccomp",),
    "time": ("limits",),
    "processes": ("seccomp",),
    "disk": ("mount",),
    "leftovers": ("seccomp+pid", "seccomp", "pid"),
}
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNT, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PDEATHSIG, SET_SECCOMP, SET_SUBREAPER, NO_NEW_PRIVS = 1, 22, 36, 38  # for prctl
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH, NO_RANDOMIZE = 2, 0x40000

# System calls: name, number on x86_64, on aarch64 (- where it has none). Refused, but for the last
# seven, which have rules. Besides the obvious: memory outside RLIMIT_AS (memfd, shm), watching
# files, changing files that one owns, which Landlock does not know (chmod, utime, xattr). What
# needs a capability (mount, chroot, ...) is refused already: none is left.
SYSTEM_CALLS = """
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, connect 42 203, bind 49 200,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, tkill 200 130,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30,
unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
keyctl 250 219, add_key 248 217, request_key 249 218, memfd_create 319 279, shmget 29 194,
semget 64 190, msgget 68 186, mq_open 240 180, mq_unlink 241 181, chmod 90 -, fchmod 91 52,
fchmodat 268 53, chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, truncate 76 45, sync 162 81,
syncfs 306 267, personality 135 92, inotify_init 253 -, inotify_init1 294 26, fanotify_init 300 262,
clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, sched_setaffinity 203 122,
socketpair 53 199, prctl 157 167
"""
ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # (audit number, column)
# From 424 on numbers are the same everywhere and nearly all are ways out (io_uring, pidfd, mount
# calls): "no such call", as an old kernel says; but close_range, openat2, faccessat2, epoll_pwait2.
SELF = 0x7FFFFFFF  # stands for the process's own id in a filter
FIRST_COMMON, COMMON_KNOWN = 424, (436, 437, 439, 441)


def libc(function: str, *args) -> int:
    """Calls a C function; -1 becomes an OSError that names it."""
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    if (result := getattr(LIBC, function)(*args)) == -1:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


def seccomp_program() -> bytes:
    """The filter, classic BPF over struct seccomp_data: number at 0, architecture at 4, arguments
    of 8 bytes from 16 on. An instruction is (code, jump if true, jump if false, value)."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"system call numbers of {platform.machine()} are not known")
    audit, column = ARCHITECTURES[platform.machine()]
    give = lambda verdict: [(0x06, 0, 0, verdict)]
    allow, refuse, unknown, kill = map(give, (0x7FFF0000, 0x50001, 0x50026, 0x80000000))
    load = lambda at: (0x20, 0, 0, at)
    equal = lambda value, yes, no: (0x15, yes, no, value)
    to_self = [load(16), equal(SELF, 1, 0), equal(0, 0, 1), *allow, *refuse]
    rules = dict.fromkeys(("kill", "tgkill", "prlimit64", "sched_setaffinity"), to_self)
    rules["clone"] = [load(16), (0x45, 0, 1, 0x10000), *allow, *refuse]  # threads only
    # streams only: asyncio wants one, a datagram socket could send to any path
    rules["socketpair"] = [load(24), (0x54, 0, 0, 0xF), equal(1, 0, 1), *allow, *refuse]
    rules["prctl"] = [load(16), equal(PDEATHSIG, 0, 1), *refuse, *allow]
    code = [load(4), equal(audit, 1, 0), *kill, load(0)]
    code += [(0x35, 0, 1, 0x40000000), *unknown]  # x32 calls
    for number in COMMON_KNOWN:
        code += [equal(number, 0, 1), *allow]
    code += [(0x35, 0, 1, FIRST_COMMON), *unknown]
    for row in SYSTEM_CALLS.replace("\n", " ").split(","):
        name, number = row.split()[0], row.split()[column]
        rule = rules.get(name, refuse)
        code += [] if number == "-" else [equal(int(number), 0, len(rule)), *rule]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*code, *allow])


def apply_seccomp(program: bytes) -> None:
    program = program.replace(struct.pack("<I", SELF), struct.pack("<I", os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("prctl", SET_SECCOMP, 2, header, 0, 0)


def readable_paths() -> list[str]:
    """What Python and its libraries read: their folders, the loader's, time zones, /dev/null."""
    system = """/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache /etc/localtime
        /usr/share/zoneinfo /dev/null /dev/zero /dev/urandom /dev/random"""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *system.split()]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [p for p in dict.fromkeys(folders) if p[:1] == "/" != p and os.path.exists(p)]


def landlock_ruleset(home: str) -> int:
    """A ruleset (a descriptor): reads of `readable_paths`, anything under `home`, nothing else.

    Versions add truncate (3), TCP (4), device ioctl (5), signals and abstract sockets (6)."""
    version = libc("syscall", 444, None, 0, 1)
    every = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    attributes = struct.pack("<QQQ", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc("syscall", 444, attributes, len(attributes), 0)
    write_file, read_file, read_folder = 2, 4, 8
    rights = dict.fromkeys(readable_paths(), read_file | read_folder)
    for path, allowed in {**rights, "/dev/null": read_file | write_file, home: every}.items():
        descriptor = os.open(path, os.O_PATH)
        allowed &= every if os.path.isdir(path) else ~read_folder
        libc("syscall", 445, ruleset, 1, struct.pack("<Qi", allowed, descriptor), 0)
        os.close(descriptor)
    return ruleset


def apply_landlock(ruleset: int) -> None:
    libc("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("syscall", 446, ruleset, 0)


def limit_resources(memory: int, disk: int) -> None:
    """Soft = hard: raising one again takes a capability."""
    limits = {"AS": memory, "FSIZE": disk, "NOFILE": 64, "CORE": 0}
    for name, value in limits.items():
        with contextlib.suppress(ValueError):  # macOS knows no RLIMIT_AS
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_capabilities() -> None:
    libc("capset", struct.pack("<II", 0x20080522, 0), bytes(24))


def enter_namespaces(flags: int) -> None:
    """CAP_SYS_ADMIN needs no user namespace; anybody else gets one that maps him to himself."""
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    try:
        libc("unshare", flags)
    except PermissionError:
        libc("unshare", flags | NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in ids.items():
            Path("/proc/self", name).write_text(f"{number} {number} 1")
    if flags & NEW_MOUNT:
        libc("mount", None, b"/", None, REC | PRIVATE, None)


def mount_tmpfs(path: str, size: int, files: int) -> None:
    options = f"size={size},nr_inodes={files},mode=700".encode()
    libc("mount", b"tmpfs", os.fsencode(path), b"tmpfs", NOSUID | NODEV | NOEXEC, options)


def build_view(root: str, home: str) -> None:
    """Where there is no Landlock: under `root` a tree of read-only mounts to chroot into."""
    os.makedirs(root)
    mount_tmpfs(root, 1 << 20, 10_000)
    os.makedirs(root + home)
    for path in readable_paths():
        inside = root + path
        if os.path.lexists(inside):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.mkdir(inside) if os.path.isdir(path) else Path(inside).touch()
        libc("mount", os.fsencode(path), os.fsencode(inside), None, BIND | REC, None)
        kept = os.statvfs(path).f_flag & (NOSUID | NODEV | NOEXEC)  # locked in a user namespace
        libc("mount", None, os.fsencode(inside), None, REMOUNT | BIND | RDONLY | kept, None)
    libc("mount", None, os.fsencode(root), None, REMOUNT | BIND | RDONLY, None)


# ---- what holds here ----


def probe(folder: str, off: list[str]) -> dict[str, str]:
    """{mechanism: "" if it works here, else why it does not}. `folder` is an empty directory."""
    trials = {
        "seccomp": lambda: apply_seccomp(seccomp_program()),
        "landlock": lambda: apply_landlock(landlock_ruleset(folder)),
        "pid": lambda: enter_namespaces(NEW_PID),
        "net": lambda: enter_namespaces(NEW_NET),
        "mount": lambda: (enter_namespaces(NEW_MOUNT), mount_tmpfs(folder, 4096, 9)),
        "capabilities": drop_capabilities,
        "limits": lambda: None,
    }
    return {n: "switched off" if n in off else try_in_fork(t) for n, t in trials.items()}


def try_in_fork(trial) -> str:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            trial()
        except Exception as error:
            os.write(writer, f"{error} ({sys.platform})".encode()[:500])
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as answer:
        return answer.read()


def guarantees(why: dict[str, str]) -> dict[str, tuple[bool, str]]:
    """{guarantee: (on, by what, or why not)} from what `probe` found."""
    found = {}
    for guarantee, choices in LAYERS.items():
        good = [c for c in choices if not any(why[m] for m in c.split("+"))]
        reasons = [f"{m}: {why[m]}" for m in choices[0].split("+") if why[m]]
        found[guarantee] = (bool(good), good[0] if good else ", ".join(reasons))
    return found
