"""How much of the optimizers' state stays on the device between steps. Pure."""

from __future__ import annotations

from collections.abc import Callable

from lms.core.link import Link
from lms.errors import LimitError

_PARTS = 4  # how finely the state is divided


def state_that_stays(wanted: int, link: Link, pass_seconds: Callable[[int], float]) -> int:
    """The bytes of the `wanted` ones with which a step is the shortest; of equals, the fewest.

    What stays makes passes longer: saved tensors have less room. What leaves makes the optimizer's step longer: its
    copies in both directions overlap with each other and with little else. `pass_seconds` says how long a pass takes
    beside so many bytes of state, and raises LimitError if it does not fit.
    """

    def seconds(stay: int) -> float:
        moved = wanted - stay
        try:
            return pass_seconds(stay) + (max(link.seconds_out(moved), link.seconds_back(moved)) if moved else 0)
        except LimitError:
            return float("inf")

    return min((wanted * part // _PARTS for part in range(_PARTS + 1)), key=seconds) if wanted else 0
