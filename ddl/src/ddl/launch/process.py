"""Child processes that end with us: started in a group of their own, signalled through us, none left behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from ddl.launch.reports import INSTEAD

if TYPE_CHECKING:
    from ddl.launch.reports import Reports
    from ddl.launch.watch import Watch

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
TAIL_BYTES = 8192
GRACE_SECONDS = 4  # for mpirun to end its ranks after a signal that asks it to
GIVEN_UP_SECONDS = 1.5  # and after we gave up on it
GUARD_SECONDS = 5.0  # for the guards to end what is left on their hosts
TICK_SECONDS = 0.25  # between two looks at whether to give up

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, or 128 + N after signal N to it or to us.

    `asked` says that we got a signal to end it. `interrupted` says that a program that takes signals got its Ctrl-C
    from us, and no signal asked us to end it. `errors` is the end of its stderr, at most TAIL_BYTES. `given_up` is why
    we ended it unasked; None if it ended by itself.
    """

    status: int
    asked: bool
    errors: str = ""
    given_up: str | None = None
    interrupted: bool = False


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphaned descendants for the time of the `with`, so that `end_children` finds them."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        # A program that calls us as a library would not wait for the children of others.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@_adopting()
def run(
    argv: Sequence[str], environment: Mapping[str, str], errors: Reports | None = None, watch: Watch | None = None
) -> Ended:
    """Run a command with our own input and output, and wait for its end, or end it if `watch` says so.

    We pass on each signal once. If the program takes signals (`reports`), it gets SIGUSR1 and SIGUSR2 in place of
    SIGINT and SIGHUP, each as often as they come. The command is not in the terminal's group, so Ctrl-C reaches it only
    through us (Open MPI takes a second one as an order to abandon its ranks); therefore it does not read a terminal
    either. Its stderr passes through us and through the filter `errors`, because its exit status alone cannot be
    trusted.
    """
    asked: list[int] = []
    interrupted = False  # a program that takes signals was asked to stop
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    # Blocked until the handlers know the process to pass signals on to.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=stdin,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: _in_child(before),
        )

        def forward(number: int, _: FrameType | None) -> None:
            nonlocal interrupted
            if errors and errors.takes_signals and number in INSTEAD:
                _write(b"ddlrun: the program gets this signal; Ctrl-\\ (SIGQUIT) ends it at once\n")
                process.send_signal(INSTEAD[signal.Signals(number)])
                interrupted = interrupted or number == signal.SIGINT
                return
            if number in ENDING and not asked:
                signal.alarm(GRACE_SECONDS)
            if number in ENDING:
                asked.append(number)
            process.send_signal(number)

        def give_up(_: int, __: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        given_up = None
        old = {number: signal.signal(number, forward) for number in FORWARDED}
        old[signal.SIGALRM] = signal.signal(signal.SIGALRM, give_up)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        tail, given_up = _pass_on(process, errors, watch, asked)
        status = process.wait()
    finally:
        signal.alarm(0)
        if watch:
            watch.end()
            watch.wait(GUARD_SECONDS)
        end_children()
        for number, handler in old.items():
            # If we were asked to end we are about to: a second Ctrl-C must not kill ddlrun with another exit status.
            signal.signal(number, signal.SIG_IGN if asked and number in ENDING else handler)
    if asked:
        return Ended(128 + asked[0], True, tail)
    return Ended(128 - status if status < 0 else status, False, tail, given_up, interrupted)


def _pass_on(
    process: subprocess.Popen[bytes], errors: Reports | None, watch: Watch | None, asked: Sequence[int]
) -> tuple[str, str | None]:
    """Copy a process's stderr to ours until the process ends, even if others still hold the pipe.

    Returns the end of stderr, and why `watch` had us end the process: None if it ended by itself, or because we were
    `asked` to end; a host that goes then is not lost.
    """
    assert process.stderr is not None
    source = process.stderr.fileno()
    tail = b""
    given_up = None
    ended = os.pidfd_open(process.pid)
    open_ends = {source, ended}
    try:
        while True:
            watches = watch if given_up is None and not asked else None
            sockets = {one.fileno(): one for one in watches.sockets()} if watches else {}
            poll = select.poll()  # select() refuses numbers above 1023: a job may have more hosts
            for descriptor in (*open_ends, *sockets):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(TICK_SECONDS * 1000 if watch else None)}
            now = time.monotonic()
            for descriptor in ready & sockets.keys():
                assert watches is not None
                watches.receive(sockets[descriptor], now)
            if source in ready:
                chunk = os.read(source, 65536)
                if not chunk:
                    open_ends.discard(source)
                chunk = errors.take(chunk) if errors else chunk
                tail = (tail + chunk)[-TAIL_BYTES:]
                _write(chunk)
            elif ended in ready:
                break
            if watches and not asked and (given_up := watches.overdue(now)) is not None:
                watches.end()
                process.terminate()
                signal.setitimer(signal.ITIMER_REAL, GIVEN_UP_SECONDS)
    finally:
        os.close(ended)
        process.stderr.close()
    if errors:
        chunk = errors.rest()
        tail += chunk
        _write(chunk)
    return tail.decode(errors="replace"), given_up


def _write(chunk: bytes) -> None:
    with suppress(OSError):  # if nobody reads our stderr any more, the program goes on
        while chunk:
            chunk = chunk[os.write(2, chunk) :]


@_adopting()
def capture(argv: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
    """Run a command for at most `seconds`. Returns its exit status (None if we ended it), output and errors.

    Ends the processes that it leaves behind, and does not wait for them: launch agents may hold its output long after
    mpirun has failed.
    """
    status: int | None = None
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(argv, environment, output, errors)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            end_children()
        texts = [_text(one) for one in (output, errors)]
    return status, texts[0], texts[1]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def capture_plain(
    argv: Sequence[str], environment: Mapping[str, str], seconds: float, stdin: str = ""
) -> tuple[int | None, str, str]:
    """As `capture`, but from any thread, for a command that leaves no children behind; it reads `stdin`."""
    try:
        done = subprocess.run(
            argv, env=dict(environment), input=stdin, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, "", ""
    except OSError as error:
        return 255, "", f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


@contextmanager
def unwinding() -> Iterator[None]:
    """Signals that ask us to end raise SystemExit inside, so that everything is cleaned up; no child is left behind.

    For code that does more than wait for a job; it starts its children with `start`.
    """
    before = _children()

    def leave(number: int, _: FrameType | None) -> None:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, leave) for number in ENDING}
    with _adopting():
        try:
            yield
        finally:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
            end_children(before)
            for number, handler in old.items():
                signal.signal(number, handler)


def start(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command without input, in a group of its own; the kernel kills it when this process ends.

    Its errors go to `errors`, or else to `output`.
    """
    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if errors is None else errors,
        process_group=0,
        preexec_fn=_in_child,
    )


def end_children(but: Collection[int] = ()) -> None:
    """End our children and adopted orphans, except those in `but`: SIGTERM first, then SIGKILL.

    If a child leads a process group, the whole group gets SIGTERM: the shell before a rank's program waits for it.
    """
    while children := [pid for pid in _children() if pid not in but]:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(-pid if os.getpgid(pid) == pid else pid, signal.SIGTERM)
        until = time.monotonic() + 2  # for all of them together
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):
                descriptor = os.pidfd_open(pid)
                try:
                    if not _readable(descriptor, until - time.monotonic()):
                        os.kill(pid, signal.SIGKILL)
                finally:
                    os.close(descriptor)
                os.waitpid(pid, 0)


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def _in_child(mask: set[signal.Signals] | set[int] | None = None) -> None:
    """Have the kernel kill this child when its parent ends in any way; unblock the signals that the parent blocked.

    With SIGKILL at once: an mpirun that still starts its daemons does not end on SIGTERM.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # The name may hold blanks and brackets; the state and the parent come after its last bracket.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(entry.name))
    return found
