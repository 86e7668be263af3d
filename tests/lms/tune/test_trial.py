import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lms.tune.metric import Log, Reading, named
from lms.tune.trial import End, Process, meaning

VALUE = Reading(1, 0.5)


@pytest.mark.parametrize(
    ("status", "last", "end", "words"),
    [
        (0, VALUE, End.RIGHT, ""),
        (6, VALUE, End.RIGHT, ""),  # it has trained; only its memory went over the limit
        (0, None, End.FAILED, "not in its log"),
        (0, Reading(1, float("nan")), End.FAILED, "not a number"),
        (1, VALUE, End.FAILED, "exit status 1"),
        (3, None, End.BELOW_FLOOR, "floor"),
        (-9, VALUE, End.DIED, "SIGKILL"),
        (137, VALUE, End.DIED, "SIGKILL"),
    ],
)
def test_what_the_end_of_a_process_means(status: int, last: Reading | None, end: End, words: str) -> None:
    found, why = meaning(status, last)
    assert found is end
    assert words in why


def process(tmp_path: Path, source: str) -> Process:
    return Process([sys.executable, "-c", source], Log(tmp_path / "log", named("a")), {"WORD": "7"}, gently=False)


def test_a_process_writes_to_its_log_and_is_waited_for(tmp_path: Path) -> None:
    one = process(tmp_path, "import os, sys; print('a=' + os.environ['WORD']); sys.exit(3)")
    while one.ended() is None:
        time.sleep(0.01)
    assert one.ended() == 3
    assert one.log.read(ended=True) == [Reading(1, 7)]
    one.close()


def test_a_process_that_is_stopped_leaves_nobody_behind(tmp_path: Path) -> None:
    child = "import time; print('up', flush=True); time.sleep(600)"
    one = process(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    while "up" not in one.log.tail():
        time.sleep(0.01)
    group = os.getpgid(one._process.pid)
    one.stop()
    while there(group):  # until the kernel has taken the child away
        time.sleep(0.01)


def there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


STARTER = """
import sys, time
from pathlib import Path
from lms.tune.metric import Log, named
from lms.tune.trial import Process
one = Process([sys.executable, "-c", "import time; time.sleep(600)"], Log(Path("log"), named("a")), {}, gently=False)
print(one._process.pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_worker_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)
