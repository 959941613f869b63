"""The filter of system calls (seccomp), as a program for the kernel's classic BPF.

Standard library only: loaded by bootstrap.py, where fly cannot be imported.
"""

import ctypes
import platform
import struct

from linux import CLONE_NEWUSER, prctl

# System calls that no program under test needs, and that get past the limits on files and
# namespaces: their numbers on (x86-64, aarch64), None where the call does not exist.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # to sockets of any kind, by path, by name or through another interface
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # to other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # to namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    # to files by number, whatever is in sight
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # to memory that no limit counts, or that outlives the program
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "io_setup": (206, 0),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180),
    # to the kernel's inner parts
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
}  # fmt: skip
# Changes of files that Landlock does not cover: refused where other people's files are visible.
_REFUSED_ON_FILES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
_CALLS_WITH_RULES = {
    "clone3": (435, 435), "clone": (56, 220), "socketpair": (53, 199), "ioctl": (16, 29),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
_SET_FLAGS, _SET_EXTENDED_FLAGS = 0x40086602, 0x401C5820  # ioctls: FS_IOC_SETFLAGS, _FSSETXATTR

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _STREAM = 1, 38, 1
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06


def filter_calls(own_files: bool) -> bool:
    """Refuse (EPERM) the system calls above, for this process and all that it starts.

    own_files: whether only the program's own files are visible. Of pairs of sockets only connected
    streams are allowed (asyncio needs them): a datagram socket could send to any path.
    """
    if platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return False
    column, architecture = _MACHINES[platform.machine()]
    calls = {**_REFUSED, **({} if own_files else _REFUSED_ON_FILES), **_CALLS_WITH_RULES}
    first, second = (_LOAD, 0, 0, 16), (_LOAD, 0, 0, 24)  # arguments' low halves, seccomp_data
    no, yes = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)
    of_itself = [first, (_JUMP_EQUAL, 0, 1, 0), yes, no]  # process id 0
    rules = {  # the others are refused
        "clone3": [(_RETURN, 0, 0, _ERRNO | _ENOSYS)],  # its flags cannot be seen; clone follows
        "clone": [first, (_JUMP_SET, 0, 1, CLONE_NEWUSER), no, yes],
        "socketpair": [second, (_AND, 0, 0, 0xF), (_JUMP_EQUAL, 0, 1, _STREAM), yes, no],
        "ioctl": [
            second, (_JUMP_EQUAL, 2, 0, _SET_FLAGS), (_JUMP_EQUAL, 1, 0, _SET_EXTENDED_FLAGS),
            yes, no,
        ],
        "prlimit64": of_itself, "sched_setaffinity": of_itself, "sched_setattr": of_itself,
    }  # fmt: skip
    code = [
        (_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_JUMP_AT_LEAST, 0, 1, 0x40000000), no,  # x32's numbers
    ]  # fmt: skip
    for name, numbers in calls.items():
        if (number := numbers[column]) is not None:
            steps = rules.get(name, [no])
            code += [(_JUMP_EQUAL, 0, len(steps), number), *steps]
    code.append(yes)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    header = struct.pack("=HxxxxxxQ", len(code), ctypes.addressof(program))
    buffer = ctypes.create_string_buffer(header)
    return prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(buffer))
