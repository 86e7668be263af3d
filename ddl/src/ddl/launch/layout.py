"""Decide: how many ranks run on each host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl.launch.counts import MOST
from ddl.launch.errors import CheckError
from ddl.launch.hosts import Allocation
from ddl.launch.machine import Machine


@dataclass(frozen=True)
class Layout:
    """Ranks on each host that takes part, in the order listed; `spares` can replace a host that fails."""

    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    spares: tuple[str, ...]
    reason: str


def choose(
    allocation: Allocation,
    machines: Mapping[str, Machine],
    *,
    ranks: int | None = None,
    accelerators: int | None = None,
) -> Layout:
    """Ranks for each host: `ranks` in all, else `accelerators` a host, else one a GPU, else the slots, else a socket.

    A host without an entry in `machines` counts as one with a single socket and no GPU. Raises CheckError if the slots
    do not suffice; it names both numbers.
    """
    hosts = allocation.hosts
    known = [machines.get(host.name) for host in hosts]
    gpus = tuple(len(one.gpus) if one else 0 for one in known)

    def limited(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(count, host.slots or count) for count, host in zip(counts, hosts, strict=True))

    if accelerators is not None:
        most = (accelerators,) * len(hosts)
        if ranks is None:
            return _made(allocation, most, f"{accelerators} on each host: --accelerators")
        if ranks > sum(most):
            raise CheckError(
                "ranks",
                f"-np asks for {ranks}, and --accelerators {accelerators} on {len(hosts)} hosts makes {sum(most)}; "
                "lower -np or raise --accelerators",
            )
        return _made(allocation, _dealt(ranks, most), f"-np {ranks}, at most {accelerators} on each host")
    if ranks is not None:
        # A host takes its slots, else its GPUs if these suffice for all ranks, else any number (None).
        soft = gpus if sum(gpus) >= ranks else (None,) * len(hosts)
        given = [host.slots if allocation.asked else None for host in hosts]
        capacity = tuple(count if slots is None else slots for count, slots in zip(soft, given, strict=True))
        return _made(allocation, _dealt(ranks, capacity), f"-np {ranks}")
    if any(gpus):
        if without := [host.name for host, count in zip(hosts, gpus, strict=True) if not count]:
            text = f"other hosts have some, and {', '.join(without)} has none; leave it out, or say -np N"
            raise CheckError("GPUs", text)
        counts = limited(gpus)
        return _made(allocation, counts, "one a GPU" if counts == gpus else "one a GPU, as far as the slots go")
    if allocation.asked and all(host.slots is not None for host in hosts):
        return _made(allocation, tuple(host.slots or 1 for host in hosts), "no GPU; the hosts' slots")
    sockets = limited([len(one.sockets) if one else 1 for one in known])
    return _made(allocation, sockets, "no GPU and no number of slots; one a socket")


def _dealt(ranks: int, most: tuple[int | None, ...]) -> tuple[int, ...]:
    """Spread `ranks` over hosts: evenly if that is possible, else host after host until all are placed.

    If no host has a limit (None), their numbers differ by at most one.
    """
    even, rest = divmod(ranks, len(most))
    if all(count is None for count in most):
        return tuple(even + (at < rest) for at in range(len(most)))
    bounds = [ranks if count is None else count for count in most]
    if not rest and even <= min(bounds):
        return (even,) * len(most)
    counts: list[int] = []
    left = ranks
    for count in bounds:
        counts.append(min(count, left))
        left -= counts[-1]
    return (*counts[:-1], counts[-1] + left)


def _made(allocation: Allocation, counts: tuple[int, ...], reason: str) -> Layout:
    hosts = allocation.hosts
    for host, count in zip(hosts, counts, strict=True):
        if host.slots is not None and count > host.slots:
            raise CheckError(
                "slots",
                f"{sum(counts)} ranks were asked for, {count} of them on {host.name}, and it has {host.slots} (of "
                f"{sum(one.slots or 0 for one in hosts)} in {allocation.source}); lower -np, or give the host more "
                f"slots, as in -H {host.name}:{count}",
            )
    if sum(counts) > MOST:
        raise CheckError("ranks", f"there would be {sum(counts):,}, and a job has at most {MOST:,}; say -np N")
    used = [(host.name, count) for host, count in zip(hosts, counts, strict=True) if count]
    spares = tuple(host.name for host, count in zip(hosts, counts, strict=True) if not count)
    if not used:
        raise CheckError("ranks", "there would be none; say -np N")
    return Layout(tuple(name for name, _ in used), tuple(count for _, count in used), spares, reason)
