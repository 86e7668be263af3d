"""Runs a command on a host, from outside of the testbed: `enter.py KEEPER DIRECTORY COMMAND...`.

A process namespace can be entered only by a child, so this process stays outside and stands for it: it passes signals
on, ends as the command ends, and takes the command along when it is killed itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

from processes import HOST_KINDS, environment, join, reset_signals

NOT_FOUND = 127  # as a shell's

_PR_SET_PDEATHSIG = 1
_PASSED_ON = {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT}


def main() -> int:
    """Start the command, then wait; the exit status is the command's."""
    keeper, (directory, *command) = int(sys.argv[1]), sys.argv[2:]
    # On a terminal the command stays in our process group: the terminal's keys reach it without us. Elsewhere it gets
    # one of its own, so that a signal to our group reaches it once, through us, and not twice.
    terminal = sys.stdin is not None and sys.stdin.isatty()
    passed_on = _PASSED_ON - ({signal.SIGINT, signal.SIGQUIT} if terminal else set())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        join(keeper, ("pid",))
    except OSError as error:
        print(f"testbed: cannot enter the host: {error}", file=sys.stderr)
        return NOT_FOUND
    child = os.fork()
    if child == 0:
        _become(keeper, directory, command, before, own_group=not terminal)
    while True:
        signo = signal.sigwaitinfo(_PASSED_ON | {signal.SIGCHLD}).si_signo
        if signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return _end_like(os.waitstatus_to_exitcode(status))
        elif signo in passed_on:
            os.kill(child, signo)


def _become(keeper: int, directory: str, command: list[str], mask: set[int], *, own_group: bool) -> NoReturn:
    try:
        if own_group:
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != 0:  # outside of the namespace is 0; the parent has ended, too early for the signal
            os._exit(NOT_FOUND)
        login = environment(keeper)
        join(keeper, HOST_KINDS)
        os.chdir(directory)
        reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(command[0], command, login)
    except OSError as error:
        print(f"testbed: {' '.join(command)}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_FOUND)


def _end_like(code: int) -> int:
    """The exit status; a command that a signal ended is followed into that end, without a core file of ours."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
