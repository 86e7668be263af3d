"""GPUs as their driver describes them: how each is linked to its host and to the others. Plain data; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lms.link.profile import Ceiling
from lms.link.speeds import nvlink_rate, pcie_rate
from lms.units import format_size, plural

FarEnd = Literal["gpu", "cpu", "switch", "unknown"]


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU."""

    index: int
    up: bool
    version: str = ""  # "2.0"; "" if the driver does not tell
    rate: float | None = None  # bytes a second in each direction, as the driver states it
    end: FarEnd = "unknown"
    bus: str = ""  # PCI address of the device at the other end

    def speed(self) -> float | None:
        """Bytes a second in each direction: the driver's figure, or else the version's."""
        return self.rate or nvlink_rate(self.version)


@dataclass(frozen=True)
class Pcie:
    """A GPU's PCI Express link: as it is now, at most with this board and slot, at most for the GPU itself."""

    generation: int
    width: int
    most_generation: int
    most_width: int
    own_generation: int = 0  # 0: the driver does not tell

    def rate(self) -> float | None:
        """Bytes a second in each direction when it is awake: it lowers its generation to rest, never its width."""
        return pcie_rate(self.most_generation, self.width)

    def words(self) -> str:
        """As people say it."""
        return f"PCIe {self.most_generation} x{self.width}"

    def warnings(self) -> list[str]:
        """What makes it slower than it could be."""
        found = []
        if self.width < self.most_width:
            found.append(
                f"x{self.width} of x{self.most_width} lanes are in use: the card or a riser may sit badly, or "
                "lanes are shared with another slot"
            )
        if self.most_width < 16:
            found.append(
                f"x{self.most_width} lanes at most: a slot (or a card) of half a GPU's usual x16, or of less; "
                "a x16 card moves to a x16 slot"
            )
        if self.own_generation > self.most_generation:
            found.append(
                f"the GPU supports PCIe {self.own_generation}, but its slot or the BIOS limits it to "
                f"PCIe {self.most_generation}"
            )
        if self.generation < self.most_generation:
            found.append(
                f"asleep: PCIe {self.generation} now, {self.most_generation} at most; it wakes when bytes move, "
                "so judge by what is measured"
            )
        return found


@dataclass(frozen=True)
class C2C:
    """The chip-to-chip link of a Grace host."""

    up: int
    count: int
    rate: float | None  # bytes a second of all that are up, in each direction


@dataclass(frozen=True)
class Gpu:
    """One GPU. None and "" are what its driver does not tell."""

    index: int
    name: str
    uuid: str = ""
    bus: str = ""  # PCI address, as NVML spells it
    memory: int = 0  # bytes
    node: int | None = None  # NUMA node that it is nearest to
    pcie: Pcie | None = None
    nvlinks: tuple[NvLink, ...] = ()
    c2c: C2C | None = None
    mig: tuple[str, ...] | None = None  # the instances it is cut into; None: it is whole
    slowed: tuple[str, ...] = ()  # why its clocks are lower than they could be

    def to(self, end: FarEnd) -> list[NvLink]:
        """Its NVLinks that are up and end there."""
        return [link for link in self.nvlinks if link.up and link.end == end]

    def host(self) -> tuple[str, Ceiling | None]:
        """The link to its host in words, and its ceiling; None if the driver does not tell enough."""
        if self.c2c is not None and self.c2c.up:
            words = f"NVLink-C2C, {self.c2c.up} of {self.c2c.count} links up"
            if self.c2c.rate is None:
                return words, None
            return words, Ceiling(self.c2c.rate, self.c2c.rate, "NVML: rate of the C2C links that are up")
        if bricks := self.to("cpu"):
            version = bricks[0].version
            words = f"NVLink {version} to the processor, {plural(len(bricks), 'link')} up".replace("  ", " ")
            return words, _together(bricks)
        if self.pcie is None:
            return "a link that the driver does not describe", None
        pcie = self.pcie.rate()
        if pcie is None:
            return self.pcie.words(), None
        return self.pcie.words(), Ceiling(
            pcie, pcie, f"{self.pcie.words()}, after its line code and before its headers"
        )

    def warnings(self, *, awake: bool = False) -> list[str]:
        """What makes it, or its links, slower than they could be; with `awake` not that PCIe rests at the moment."""
        found = []
        by_pcie = not (self.to("cpu") or (self.c2c is not None and self.c2c.up))
        if self.pcie is not None and by_pcie:  # else bytes take another way than PCIe
            pcie = replace(self.pcie, generation=self.pcie.most_generation) if awake else self.pcie
            found += pcie.warnings()
        down = [link.index for link in self.nvlinks if not link.up]
        if down and len(down) < len(self.nvlinks):
            found.append(
                f"{len(down)} of {len(self.nvlinks)} NVLinks are down ({', '.join(map(str, down))}): "
                "they count for nothing here"
            )
        if self.c2c is not None and self.c2c.up < self.c2c.count:
            found.append(f"{self.c2c.count - self.c2c.up} of {self.c2c.count} C2C links are down")
        if self.mig is not None:
            instances = ", ".join(self.mig) if self.mig else "none yet"
            found.append(f"cut into MIG instances ({instances}): they share its links, and none reaches a peer GPU")
        found += [f"slowed down: {reason}" for reason in self.slowed]
        return found


def pair_words(one: Gpu, other: Gpu, ancestor: str = "") -> str:
    """How two GPUs reach each other: `NV` with the count of NVLinks that are up, else `ancestor`."""
    links = _joining(one, other)
    return f"NV{len(links)}" if links else ancestor or "?"


def pair_ceiling(one: Gpu, other: Gpu) -> Ceiling | None:
    """The most that two GPUs can exchange over NVLink; None if they have none, or if its rate is not known."""
    return _together(_joining(one, other))


def _joining(one: Gpu, other: Gpu) -> list[NvLink]:
    """The NVLinks between two GPUs that are up: direct ones, or those to the switch of the GPU that has fewer."""
    direct = [link for link in one.to("gpu") if link.bus.lower() == other.bus.lower()]
    return direct or min(one.to("switch"), other.to("switch"), key=len)


def _together(links: Sequence[NvLink]) -> Ceiling | None:
    """The most that the links carry together; None if there are none, or if the rate of one is not known."""
    speeds = [speed for link in links if (speed := link.speed()) is not None]
    if not speeds or len(speeds) < len(links):
        return None
    rate = sum(speeds)
    return Ceiling(rate, rate, f"{len(links)} NVLinks that are up, {format_size(rate / len(links))}/s each")


LEGEND: Mapping[str, str] = {
    "NV": "so many NVLinks that are up",
    "PIX": "one PCIe switch between them",
    "PXB": "several PCIe switches",
    "PHB": "the processor's PCIe bridge",
    "NODE": "several bridges of one processor",
    "SYS": "another processor's, over the bus between them",
    "SELF": "on one board",
}


def matrix(gpus: Sequence[Gpu], ancestors: Mapping[tuple[int, int], str]) -> list[list[str]]:
    """The table of GPUs by GPUs: `X` for itself, else `pair_words`. `ancestors` is by the GPUs' indices."""
    return [
        ["X" if one is other else pair_words(one, other, ancestors.get((one.index, other.index), "")) for other in gpus]
        for one in gpus
    ]
