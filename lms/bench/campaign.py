"""One model measured in every way: the cells, the order of their steps, and the caps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from allocators import JEMALLOC, POOL
from cap import Cap, can_swap
from crew import Worker, WorkerError
from figures import JUDGED_SHARE, Cell

from lms.errors import LMSError

# Steps before the timed ones. LMS records in the first pass, follows its plan from the second on, makes it anew from
# better measurements after the second and the fourth, and stops measuring memory with the sixth.
WARM = {"lms": 5, "plain": 2, POOL: 2, JEMALLOC: 2, "checkpoint": 2}
CAP_ROOM = 1.10  # the cap of both capped cells, times the most that LMS's cgroup counted
LOOSE = 2**40
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """Settings of all cells."""

    size: str
    device: str
    threads: int
    rounds: int
    shares: tuple[float, ...]
    spill_dir: Path
    swap_dir: Path
    swap: bool  # whether to try the cells under a cap
    refused: Mapping[str, str]  # allocators that no cell can be over here, each with the reason
    against: Path | None = None  # another checkout: its LMS takes part


@dataclass
class Campaign:
    """The cells of one model, and the processes behind them."""

    model: str
    settings: Settings
    advance: Callable[[str], None]
    cells: dict[str, Cell] = field(default_factory=dict)
    memory: str = ""  # what "resident" means on this device

    def run(self) -> dict[str, Cell]:
        """Start every cell, warm it up, then let all take their timed steps in turn.

        A cell that cannot run gets a note and no timed steps. Raises WorkerError when plain itself cannot.
        """
        with ExitStack() as stack:
            crew: dict[str, Worker] = {}

            def start(cell: Cell, cap: Cap | None = None) -> Worker | None:
                worker = self._start(cell, cap)
                if worker is not None:
                    stack.callback(worker.close)
                    crew[cell.name] = worker
                return worker

            self._add(Cell("plain", "plain"), start)
            self._add(Cell("plain-again", "plain"), start)
            if "plain" not in crew:
                raise WorkerError(f"{self.model}, plain: {self.cells['plain'].note}")
            for allocator in (POOL, JEMALLOC):
                cell = Cell(allocator, allocator)
                if allocator in self.settings.refused:
                    cell.note = f"not run: {self.settings.refused[allocator]}"
                    self.cells[cell.name] = cell
                else:
                    self._add(cell, start)
            self._add(Cell("checkpoint", "checkpoint"), start)
            fits = Cell("lms-fits", "lms")
            self._add_managed(fits, start)
            if fits.steps:
                for share in self.settings.shares:
                    self._add_managed(managed(share, fits.last("saved")), start)
                if self.settings.swap:
                    self._add_capped(fits, start)
            names = list(crew)
            for names_in_order in rotations(names, self.settings.rounds):
                for name in names_in_order:
                    cell = self.cells[name]
                    if not cell.note:
                        self._step(cell, crew[name])
        return self.cells

    def _add(self, cell: Cell, start: Callable[[Cell], Worker | None]) -> None:
        """Start the cell and warm it up."""
        self.cells[cell.name] = cell
        worker = start(cell)
        if worker is not None:
            self.memory = str(worker.opening["memory"])
            self._warm_up(cell, worker)

    def _add_managed(self, cell: Cell, start: Callable[[Cell], Worker | None]) -> None:
        """Start this checkout's cell, and the other's beside it."""
        self._add(cell, start)
        if self.settings.against is not None:
            name = f"{cell.name} {self.settings.against.name}"
            self._add(replace(cell, name=name, steps=[], note="", other=True), start)

    def _add_capped(self, fits: Cell, start: Callable[..., Worker | None]) -> None:
        """LMS at the judged share under a cap a little above its own need, and plain under the same cap with swap."""
        capped = managed(JUDGED_SHARE, fits.last("saved"))
        capped.name = "lms-capped"
        swap = Cell("swap", "plain")
        self.cells |= {capped.name: capped, swap.name: swap}
        if reason := can_swap():
            capped.note = swap.note = f"not run: {reason}"
            return
        try:
            cap = Cap(LOOSE).__enter__()
            worker = start(capped, cap)
            if worker is None:
                swap.note = "not run: the cell whose cap it shares did not run"
                return
            self._warm_up(capped, worker)
            most = cap.peak()
            if most is None or capped.note:
                capped.note = capped.note or "not run: this kernel does not report a cgroup's peak"
                swap.note = "not run: no cap to share"
                return
            capped.cap = swap.cap = int(CAP_ROOM * most)
            cap.tighten(capped.cap)
            worker = start(swap, Cap(swap.cap, swap=self.settings.swap_dir).__enter__())
            if worker is not None:
                self._warm_up(swap, worker)
        except LMSError as error:
            swap.note = f"not run: {error}"

    def _start(self, cell: Cell, cap: Cap | None) -> Worker | None:
        settings = self.settings
        self.advance(f"{self.model}: {cell.name}")
        tree = settings.against if cell.other and settings.against is not None else ROOT
        try:
            return Worker(
                {
                    "model": self.model,
                    "size": settings.size,
                    "kind": cell.kind,
                    "budget": cell.budget,
                    "device": settings.device,
                    "threads": settings.threads,
                    "spill_dir": str(settings.spill_dir),
                },
                cap,
                program=tree / "lms" / "bench" / "worker.py",
                source=tree / "lms" / "src",
            )
        except WorkerError as error:
            cell.note = str(error)
            return None

    def _warm_up(self, cell: Cell, worker: Worker) -> None:
        # The first plain cell goes as far as any other, because all are compared with it step by step.
        cell.warm = max(WARM.values()) if cell.name == "plain" else WARM[cell.kind]
        for _ in range(cell.warm):
            if not cell.note:
                self._step(cell, worker)

    def _step(self, cell: Cell, worker: Worker) -> None:
        try:
            cell.steps.append(worker.step())
        except WorkerError as error:
            cell.note = str(error)
        self.advance(f"{self.model}: {cell.name}")


def managed(share: float, saved: float) -> Cell:
    """The cell of LMS with a budget of that share of the saved bytes."""
    return Cell(f"lms-{100 * share:.0f}%", "lms", share, int(share * saved))


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: it begins one cell later each time, so that no cell always follows the same moment."""
    for number in range(rounds):
        at = number % len(names)
        yield [*names[at:], *names[:at]]


def steps_to_take(settings: Settings, models: int) -> int:
    """How often `advance` will be called, for the progress bar."""
    managed_cells = (1 + len(settings.shares)) * (1 if settings.against is None else 2) + settings.swap
    # And the first plain cell, which warms up for as long as LMS.
    others = 2 + settings.swap + len({POOL, JEMALLOC} - settings.refused.keys())
    warm = (managed_cells + 1) * WARM["lms"] + others * WARM["plain"]
    return models * (warm + (managed_cells + 1 + others) * (1 + settings.rounds))
