"""Recomputation: watches the modules, has the planner choose among them, and has those run twice.

Candidates are those modules whose forward could run twice without anyone noticing. What is needed to know that is
looked at, not the class of the module.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Module

from lms.core.plan import Choice
from lms.core.recompute import Candidate
from lms.torch.hooks import SavedTensorHooks
from lms.torch.modules import ModuleNames
from lms.torch.recompute.forward import Forward, Run
from lms.torch.recompute.repeat import repeat
from lms.torch.recompute.surroundings import Traits, traits_of
from lms.torch.recompute.watch import Watch, watchable
from lms.torch.swapper import SavedTensorSwapper, graph_task

_PATIENCE = 16  # steps for which better times are waited for, and as many for a pass that is as planned


class Recomputation:
    """If `wanted`: chooses once, as soon as a plan moves something, and has those modules recomputed from then on."""

    def __init__(
        self, names: ModuleNames, swapper: SavedTensorSwapper, hooks: SavedTensorHooks, *, wanted: bool
    ) -> None:
        self._wanted = wanted
        self._names = names
        self._swapper = swapper
        self._planner = swapper.planner
        self._hooks = hooks
        self._forwards: dict[Module, Forward] = {}  # the stand-ins
        self._watch: Watch | None = None  # while passes are watched
        self._steps = 0  # with a plan that moves something; then those in which passes are watched

    def after_step(self) -> None:
        """An optimizer has stepped: choose, or get ready for that."""
        planner = self._planner
        if not self._wanted:
            return
        self._swapper.learn()
        if planner.choice is not None:
            self._wanted = bool(planner.choice.modules)  # the planner may have had to give them up
            if not self._wanted:
                self.close()
        elif self._watch is not None:
            self._steps += 1
            sure = planner.refined or self._steps >= _PATIENCE
            candidates = self._watch.candidates(self._names.known) if sure else None
            if candidates is not None:
                self._choose(candidates)
            elif sure:
                planner.measure_next()  # with new shapes in each step, too, the next pass gets a plan
            elif self._steps == 2 * _PATIENCE:
                planner.tell_choice(
                    Choice(f"none: in {2 * _PATIENCE} steps no pass was like the one that the plan is for")
                )
                self.close()
        elif planner.plan is not None and planner.plan.moves:
            self._steps += 1
            if planner.refined or self._steps >= _PATIENCE:  # with new shapes in each step no plan is ever refined
                self._begin_to_watch()

    def _begin_to_watch(self) -> None:
        self._steps = 0
        self._watch = Watch(self._swapper, self._hooks)
        for module in watchable(self._names.known):
            self._stand_in(module, "", self._watch, traits_of(module))
        self._planner.measure_next()

    def _choose(self, candidates: Mapping[Module, Candidate]) -> None:
        chosen = self._planner.choose_modules(list(candidates.values())).modules
        traits = {module: forward.traits for module, forward in self._forwards.items()}
        self.close()
        for module, one in candidates.items():
            if one.name in chosen:
                self._stand_in(module, one.name, repeat, traits[module])

    def _stand_in(self, module: Module, name: str, run: Run, traits: Traits) -> None:
        self._forwards[module] = module.forward = Forward(module, name, run, self._acts, traits)

    def _acts(self) -> bool:
        """Whether this is a forward whose saved tensors are the session's. Under a checkpoint they are not."""
        if not torch.is_grad_enabled() or not self._swapper.native.open or graph_task() != -1:
            return False
        if not self._hooks.are_innermost():
            if self._watch is not None:
                self._watch.lose_sight()
            return False
        return not self._swapper.mover.engine.capturing()

    def close(self) -> None:
        """Give all modules their own forward again."""
        self._watch = None
        for module, forward in self._forwards.items():
            if vars(module).get("forward") is forward:
                del module.forward
        self._forwards.clear()
