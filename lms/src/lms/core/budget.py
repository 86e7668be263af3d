"""One arbiter of a device's memory: how much of it each of its clients may hold. Pure.

A *client* holds bytes on the device and can have them leave: the saved tensors of a pass, or state that lives from step
to step. All other bytes are *outside*: parameters that stay, scratch memory, the framework. A client of a higher
priority gets what it wants before the others. Each of those keeps at least what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

_RESERVE = 1 / 256  # of the limit: what plans leave free, because the memory outside is never quite the same
_UNPROVEN = 5  # reserves that are left free until something was swapped: the copies' own memory is not measured before
_UNBOUNDED = 1 << 62


@dataclass(eq=False)
class Client:
    """One that asks a `Budget`. Sizes in bytes."""

    priority: int  # the highest comes first; of equals, the one that the budget was given first
    most: int | None = None  # what it may hold whatever else the device holds
    held: int = 0  # on the device now
    wanted: int = 0  # what it would hold if all fitted
    needed: int = 0  # what one operation of it uses at once, and so cannot leave


class Budget:
    """Divides `limit` bytes of a device; None bounds only the clients that have a bound of their own."""

    def __init__(self, limit: int | None, *clients: Client) -> None:
        self.limit = limit
        self.reserve = int((limit or 0) * _RESERVE)
        self.margin = 0  # by how much real peaks went over the limit although their plans foresaw less
        self.proven = False  # a pass that was measured has swapped
        self.outside = 0
        self._clients = sorted(clients, key=lambda client: -client.priority)

    def measure(self, current: int) -> None:
        """`current` bytes are on the device, those that the clients hold included."""
        self.outside = current - sum(client.held for client in self._clients)

    def beside(self, client: Client) -> int:
        """Bytes on the device that `client` does not hold, when they were last measured."""
        return self.outside + sum(other.held for other in self._clients if other is not client)

    def share(self, client: Client) -> int:
        """Bytes of the limit that are for `client`. If it holds more, clients that come before it want the rest."""
        if self.limit is None:
            return _UNBOUNDED
        rest, before = self.limit - self.margin - self.outside, True
        for other in self._clients:
            if other is client:
                before = False
            else:
                rest -= max(other.wanted, other.needed) if before else other.needed
        return max(rest, client.needed)

    def room(self, client: Client, beside: int, spare: int) -> int:
        """Bytes that `client` may hold now: of its share, what others have not yet to give up.

        At most `beside` bytes that are not the client's are on the device meanwhile, and `spare` bytes stay free.
        """
        if self.limit is None:
            return _UNBOUNDED if client.most is None else client.most
        free = max(0, min(self.share(client), self.limit - self.margin - beside - spare))
        return free if client.most is None else min(free, client.most)

    def fits(self, peak: int) -> bool:
        """Whether a pass with this peak needs nothing to be moved."""
        return self.limit is None or peak <= self.limit - self.margin - self.reserve

    def planned(self, least: int) -> int:
        """The peak that a plan under the limit may foresee; never less than `least`."""
        assert self.limit is not None
        return max(self.limit - self.margin - self.reserve * (1 if self.proven else _UNPROVEN), least)

    def over(self, peak: int) -> int:
        """By how many bytes the peak is over the limit; 0 if it is not, or by no more than the reserve."""
        return peak - self.limit if self.limit is not None and peak > self.limit + self.reserve else 0
