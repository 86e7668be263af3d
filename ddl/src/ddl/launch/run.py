"""The stages of ddlrun: ask (`options`), look, decide, write, run.

Plain data goes from each stage to the next: Options, Found, Job, Launch, Ended. Only `decide`, with what it calls, and
`command` choose anything, and they are pure; the other stages look at the machine, write files and start processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ddl.launch import checks, command, folders, program
from ddl.launch.attempt import attempt
from ddl.launch.checks import Check
from ddl.launch.console import echo, say, show, warn
from ddl.launch.decide import Found, Job, decide
from ddl.launch.errors import CheckError
from ddl.launch.look import look, reach_hosts
from ddl.launch.machine import free_port
from ddl.launch.options import Export, Options


def run(asked: Options, environ: Mapping[str, str] | None = None) -> int:
    """Run the program as `asked`; the exit status of its last attempt. Raises LaunchError if it cannot be started."""
    words, why = program.find(asked.program)
    found = replace(look(asked, dict(os.environ if environ is None else environ)), program=words)
    checks.tell(found.rows, warn)
    job = decide(asked, found)
    if asked.verbose:
        for reason in (("program", why), *job.reasons):
            say(": ".join(reason))
    folder = folders.name(asked.log_dir)
    if asked.dry_run:
        launch = command.build(job, folder)
        echo(str(launch))
        for name in launch.secrets:
            say(f"{name}: its value is not shown; to run this command yourself, write it in place of {command.MASK}")
        for name, text in launch.files.items():
            show(f"# {folder / name}\n{text.rstrip()}")
        return 0
    for restart in range(1, asked.restarts + 2):
        ended, seconds = attempt(asked, job, folder)
        if ended.status == 0:
            return 0
        if restart > asked.restarts or ended.asked:
            say(f"the program ended with exit status {ended.status} after {seconds:.0f} s; {folder}")
            break
        say(f"the program ended with exit status {ended.status}; restart {restart} of {asked.restarts}")
        try:
            job = _again(asked, job, restart)
        except CheckError as error:
            for line in error.lines:
                say(f"no restart: {line}")
            break
    return ended.status


def doctor(asked: Options, environ: Mapping[str, str] | None = None) -> int:
    """Run the checks alone and print a table; 0 if none failed, else CheckError's exit status."""
    rows: list[Check] = []
    try:
        found = look(asked, dict(os.environ if environ is None else environ), rows)
        if checks.failures(rows) is None:
            planned = ("ranks", "spare hosts", "dimensions", "network", "transport")
            rows += [Check(checks.OK, *reason) for reason in decide(asked, found).reasons if reason[0] in planned]
    except CheckError as error:
        rows += [Check(checks.FAILED, subject, text) for subject, text in error.failures]
    show(checks.table(rows))
    return CheckError.exit_status if checks.failures(rows) else 0


def _again(asked: Options, job: Job, restart: int) -> Job:
    """The job for another attempt, with as many ranks; spare hosts replace those that are gone.

    If there are not enough spare hosts, raises CheckError, which names each host that is gone.
    """
    found: Found = job.found
    reached = reach_hosts(asked, found)
    gone = [] if asked.skipchecks else [name for name in job.counts if name not in reached.machines]
    if gone:
        spares = [name for name in job.spares if name in reached.machines]
        if len(spares) < len(gone) or asked.rankfile is not None:
            why = "it is gone, and no spare host is listed"
            said = {name: reached.problems.get(name, "") for name in gone}
            raise CheckError(*((f"host {name}", f"{why}: {text}".rstrip(": ")) for name, text in said.items()))
        say(f"without {', '.join(gone)}; {', '.join(spares[: len(gone)])} instead")
        left = tuple(host for host in found.allocation.hosts if host.name in reached.machines)
        found = replace(found, allocation=replace(found.allocation, hosts=left))
    exports = (*asked.exports, Export("DDL_RESTART", str(restart)))
    asked = replace(asked, ranks=len(job.places), exports=exports)
    return decide(asked, replace(found, machines=reached.machines, port=free_port()))
