"""What is learned from passes: which plan leads the next one, and when it is made anew."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence

import pytest

from lms.core.budget import Budget, Client
from lms.core.guide import Guide
from lms.core.link import Link
from lms.core.trace import AccessKind
from lms.errors import LimitError
from lms.runtime import guides, plan_maker
from lms.runtime.guides import MOST_GUIDES
from lms.runtime.planner import MOST_UNSEEN, TIMED_EVERY, PassPlanner
from lms.runtime.recorder import Counters, Finished
from lms.runtime.state_room import StateRoom

LABEL = ("block.1", "float32", (1,))


Planner = Callable[..., PassPlanner]


@pytest.fixture
def make(machine: object, tier: object) -> Planner:
    def planner(*, limit: int | None = None, budget: int | None = None, state: int = 0) -> PassPlanner:
        saved, other = Client(priority=1, most=budget), Client(priority=0, wanted=state)
        bounds = Budget(limit, saved, other)
        return PassPlanner(machine, tier, bounds, saved, other, prefetch=None, write_ahead=None, facts={})  # type: ignore[arg-type]

    return planner


def run(
    planner: PassPlanner,
    sizes: Sequence[int],
    *,
    backward: bool = True,
    broken: bool = False,
    other: int = 100,
    gap: float = 1.0,
    pause_at: int = -1,
) -> Guide | None:
    """One pass over a chain of records of these sizes, led by whatever the planner chooses; the guide it ended with.

    No more is held than the guide's caps allow, or the budget if there is no guide. Each access takes `gap` seconds,
    the one at `pause_at` 20 more.
    """
    machine = planner.device
    machine.most = other
    guide, recorder = planner.begin(("write", 0, sizes[0]), 0)
    live = held = most_out = 0

    def access(kind: AccessKind, index: int, change: int) -> None:
        nonlocal live, held, most_out
        position = recorder.position
        machine.now += gap + 20.0 * (position == pause_at)
        machine.most = other + held
        recorder.enter()
        recorder.access(kind, index)
        live += change
        within = guide is not None and position < len(guide.keys)
        held = max(0, min(live, guide.plan.cap[position] if within else planner.room(max(sizes))))
        most_out = max(most_out, live - held)
        recorder.leave(held, held)

    for index, size in enumerate(sizes):
        recorder.new(size, LABEL, pinned=False)
        access("write", index, size)
    for index in reversed(range(len(sizes))) if backward else ():
        access("read", index, -sizes[index])
        recorder.freed[index] = recorder.position
    machine.now += gap
    machine.most = other + held
    recorder.finish()
    machine.most = other
    recorder.broken = broken
    keys = recorder.keys()
    if guide is not None and guide.keys != keys:
        guide = planner.choose(keys)
    whole = guide if guide is not None and guide.keys == keys else None
    counters = Counters(out=most_out)
    planner.note(Finished(recorder, whole, counters, sum(sizes), gap * (2 * len(sizes) + 1)))
    return whole


def test_the_first_pass_has_no_plan_and_the_second_has(make: Planner) -> None:
    planner = make(budget=200)
    assert planner.plan is planner.trace is None
    assert run(planner, [100] * 6) is None
    assert planner.plan is not None
    assert planner.plan.moves
    assert planner.news == [planner.plan]
    assert run(planner, [100] * 6) is planner.current
    assert planner.progress.passes == 2
    assert planner.replans == 0


def test_each_sequence_of_accesses_keeps_its_plan(make: Planner) -> None:
    planner = make(budget=200)
    shapes = [[100] * 6, [100] * 7, [100, 50] * 3, [90] * 4]
    for sizes in shapes:
        assert run(planner, sizes) is None
    for sizes in [*shapes, *reversed(shapes)]:
        guide = run(planner, sizes)
        assert guide is not None
        assert [record.nbytes for record in guide.trace.tensors] == sizes
        assert planner.current is guide
    assert planner.replans == len(shapes) - 1


def test_a_plan_moves_no_more_than_it_must_once_the_budget_is_proven(make: Planner) -> None:
    planner = make(limit=25_600)  # plans leave 500 bytes free, and only 100 after something has moved
    for other in (100, 100, 100, 1300):
        run(planner, [100] * 240, other=other)
    assert planner.plan is not None
    assert planner.plan.moves
    run(planner, [100] * 240, other=1300)
    assert not planner.plan.moves


def test_of_plans_that_begin_alike_the_last_used_is_tried_first(make: Planner) -> None:
    planner = make(budget=200)
    run(planner, [100] * 6)
    run(planner, [100] * 7)
    run(planner, [100] * 6)
    guide = planner.choose([("write", 0, 100)])
    assert len(guide.trace.tensors) == 6
    assert planner.choose([("write", 0, 99)]) is None


def test_the_plan_that_was_used_longest_ago_is_forgotten_first(make: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "MOST_GUIDES", 3)
    planner = make(budget=0)
    for size in (10, 20, 30):
        run(planner, [size] * 3)
    run(planner, [10] * 3)
    run(planner, [40] * 3)
    assert [guide.keys[0][2] for guide in planner.guides] == [30, 10, 40]


def test_more_shapes_than_plans_are_kept_are_each_learned_again(make: Planner) -> None:
    planner = make(budget=0)
    shapes = [[10 + size] * 3 for size in range(MOST_GUIDES + 6)]
    for sizes in [*shapes, *shapes]:
        run(planner, sizes)  # most get their plan when they come again
    for sizes in shapes:
        assert run(planner, sizes) is None, "it was forgotten before it came again"
    assert len(planner.guides) == MOST_GUIDES
    assert run(planner, shapes[-1]) is not None


def test_passes_unlike_all_before_get_a_plan_when_they_come_again(make: Planner) -> None:
    planner = make(budget=0)
    shapes = [[10 + size] * 3 for size in range(MOST_UNSEEN + 6)]
    for sizes in shapes:
        run(planner, sizes)
    made = len(planner.guides)
    assert made == MOST_UNSEEN
    run(planner, shapes[-1])
    assert len(planner.guides) == made + 1
    assert run(planner, shapes[-1]) is not None


def test_what_fits_and_comes_again_is_led_without_being_shown(make: Planner) -> None:
    planner = make(limit=10_000)
    for size in range(100, 110):
        run(planner, [size] * 6)
    shown, replans = planner.plan, planner.replans
    assert [run(planner, [50] * 6) is not None for _ in range(4)] == [False, False, False, True]
    assert planner.plan is shown
    assert planner.replans == replans


def test_a_pass_without_a_backward_teaches_nothing(make: Planner) -> None:
    planner = make(budget=0)
    run(planner, [100] * 3, backward=False)
    assert planner.plan is None
    assert planner.progress.passes == 1
    assert not planner.guides


def test_an_evaluation_before_the_first_step_does_not_make_the_training_old(make: Planner) -> None:
    planner = make(limit=400)
    for _ in range(5):
        run(planner, [40] * 2, other=200, backward=False)
    run(planner, [50] * 8, other=700)
    with pytest.raises(LimitError, match="limit 400 B is below the floor"):
        run(planner, [50] * 8, other=700)
    assert planner.peaks.over == 0, "the first pass of a training may exceed it"


def test_a_pass_in_which_a_hook_raised_teaches_nothing(make: Planner) -> None:
    planner = make(budget=0)
    run(planner, [100] * 3, broken=True)
    assert planner.plan is None
    assert planner.progress.passes == 1


def test_a_plan_is_made_anew_from_the_median_of_what_it_took(make: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = make(budget=200)
    made = []
    monkeypatch.setattr(
        plan_maker,
        "make_plan",
        lambda trace, *a, make=plan_maker.make_plan, **k: made.append(trace) or make(trace, *a, **k),
    )
    for gap in (9.0, 1.0, 5.0, 2.0, 7.0, 7.0):
        run(planner, [100] * 6, gap=gap)
    assert [trace.accesses[3].seconds for trace in made] == [9.0, 1.0, 2.0]
    assert planner.trace is made[-1]


def test_a_fixed_budget_is_what_may_stay(make: Planner) -> None:
    planner = make(budget=123)
    assert planner.room(50) == 123
    run(planner, [100] * 3)
    assert planner.room(50) == 123


def test_under_a_limit_what_may_stay_is_what_all_else_leaves(make: Planner) -> None:
    planner = make(limit=1000)
    run(planner, [50] * 4, other=300)
    assert planner.room(0) == 1000 - 300 - 2 * 50
    assert planner.room(80) == 1000 - 300 - 2 * 80
    run(planner, [50] * 4, other=950)
    assert planner.room(0) == 0


def test_nothing_is_measured_for_a_plan_that_moves_nothing(make: Planner, tier: object) -> None:
    tier.link = lambda: None
    tier.calibrate = lambda nbytes: pytest.fail("nobody needs to know how fast the link is")
    planner = make(limit=10_000)
    run(planner, [50] * 4)
    assert planner.plan.moves == ()


def test_a_link_that_nothing_has_crossed_yet_is_calibrated(make: Planner, tier: object) -> None:
    link, asked = tier.link(), []
    tier.link = lambda: None
    tier.calibrate = lambda nbytes: asked.append(nbytes) or link
    run(make(budget=0), [50] * 4)
    assert asked == [plan_maker.CALIBRATION]


def test_a_calibration_stays_within_the_limit(make: Planner, tier: object) -> None:
    link, asked = tier.link(), []
    tier.link = lambda: None
    tier.calibrate = lambda nbytes, piece: asked.append(piece) or link
    run(make(limit=100_000_000), [50_000_000] * 4, other=60_000_000)
    assert len(asked) == 1
    assert 1 << 20 <= asked[0] <= 20_000_000


def test_a_limit_below_the_floor_is_refused_once_and_names_the_module(make: Planner) -> None:
    planner = make(limit=500)
    run(planner, [50] * 4, other=700)
    with pytest.raises(LimitError, match=r"limit 500 B is below the floor of 750 B.*'block.1'"):
        planner.begin(("write", 0, 50), 0)
    assert planner.begin(("write", 0, 50), 0)[0] is None


def test_a_plan_is_made_again_before_a_pass_that_begins_with_more_outside(make: Planner) -> None:
    planner = make(limit=1000)
    run(planner, [100] * 6, other=300)
    before = planner.plan
    assert not before.moves
    planner.progress.steps = 1
    guide = run(planner, [100] * 6, other=600)  # the optimizer's state has come
    assert guide.plan is not before
    assert guide.plan.moves
    assert guide.plan.forecast.resident_peak <= 1000


def test_in_the_middle_of_a_pass_nothing_is_planned_and_the_next_pass_has_the_plan(
    make: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = make(limit=1000)
    run(planner, [100] * 6, other=300)
    run(planner, [100] * 7, other=300)
    planner.steps = 1
    run(planner, [100] * 7, other=600)  # a pass that begins is taken for one like this
    keys = [("write", at, 100) for at in range(6)] + [("read", 5, 100)]
    with monkeypatch.context() as patched:
        patched.setattr(plan_maker, "make_plan", lambda *_args, **_options: pytest.fail("it was planned"))
        assert planner.choose(keys) is None
    guide = run(planner, [100] * 6, other=600)
    assert guide is not None
    assert guide.outside == 600
    assert guide.plan.moves


def test_passes_that_begin_with_and_without_gradients_keep_a_plan_each(make: Planner) -> None:
    planner = make(limit=1000)
    for others in [(300, 500)] * 4:
        for other in others:
            run(planner, [100] * 6, other=other)
    replans = planner.replans
    first, second = (run(planner, [100] * 6, other=other) for other in (300, 500))
    assert planner.replans == replans
    assert first is not second
    assert len(first.plan.moves) < len(second.plan.moves)


def test_a_limit_that_proves_too_low_in_the_first_steps_ends_the_training(make: Planner) -> None:
    planner = make(limit=400)
    run(planner, [50] * 8, other=200)
    planner.progress.steps = 1
    assert run(planner, [50] * 8, other=700) is None, "no plan can keep the limit, so the rule leads and it is measured"
    planner.progress.steps = 2
    with pytest.raises(LimitError, match="limit 400 B is below the floor of 750 B"):
        run(planner, [50] * 8, other=700)


def test_what_the_optimizers_step_needs_counts_too(make: Planner, machine: object) -> None:
    planner = make(limit=1000)
    run(planner, [50] * 4, other=300)
    for step in (1, 2):
        planner.progress.steps = step
        machine.most = 1500
        if step == 1:
            _guide, recorder = planner.begin(("write", 0, 50), 0)
            machine.most = 300
            recorder.finish()
            planner.note(Finished(recorder, None, Counters(), 0, 1.0))
    with pytest.raises(LimitError, match=r"between two passes, with nothing saved, the process needs 1\.5 KB"):
        planner.begin(("write", 0, 50), 0)


def test_a_pause_counts_as_a_peak_and_ends_no_training(make: Planner, machine: object) -> None:
    planner = make(limit=1000)
    for step in (1, 2):
        run(planner, [50] * 4, other=300)
        planner.progress.steps = step
        planner.peaks.pause()
        machine.most = 1500
        planner.peaks.resume()
        machine.most = 300
    run(planner, [50] * 4, other=300)
    assert planner.peaks.most == 1500
    assert planner.peaks.over == 500
    assert planner.peaks.where == "in a pause after pass 1"
    assert not planner.peaks.exceeded_lately


def test_the_most_between_two_passes_is_known_and_neither_pauses_nor_a_measured_link_count(
    make: Planner, machine: object, tier: object
) -> None:
    link = tier.link()

    def calibrate(nbytes: int, piece: int = 0) -> object:
        machine.most = 9000
        return link

    tier.link, tier.calibrate = lambda: None, calibrate
    planner = make(limit=10_000)
    planner.peaks.before_a_pass()
    assert planner.peaks.between == 0, "the time before the first pass is not one between two"
    run(planner, [50] * 4, other=300)
    machine.most = 700
    planner.peaks.pause()
    machine.most = 2000
    assert planner.peaks.between == 700
    planner.peaks.resume()
    machine.most = 600
    assert planner.maker.link() is link
    machine.most = 600
    assert planner.peaks.between == 700
    run(planner, [50] * 4, other=300)
    assert planner.peaks.between == 700
    machine.most = 800
    planner.peaks.close()
    run(planner, [50] * 4, other=300)  # whose end is noted late
    machine.most = 5000
    assert planner.peaks.between == 800


def test_what_the_optimizers_step_needed_before_a_pause_is_not_forgotten(make: Planner, machine: object) -> None:
    planner = make(limit=1000)
    for _ in range(2):
        run(planner, [50] * 4, other=300)
        planner.progress.steps = 1
        machine.most = 1500
        planner.peaks.pause()
        machine.most = 300
        planner.peaks.resume()
    with pytest.raises(LimitError, match=r"between two passes, with nothing saved, the process needs 1\.5 KB"):
        planner.begin(("save", 0, 50), 0)


def test_a_training_that_is_under_way_is_not_ended_for_its_limit(make: Planner) -> None:
    planner = make(limit=400)
    for step in range(1, 8):
        run(planner, [50] * 8, other=200)
        planner.progress.steps = step
    assert not planner.peaks.over
    with pytest.warns(RuntimeWarning) as told:
        led = [run(planner, [50] * 8, other=700) for _ in range(5)]
    assert None not in led
    assert [str(warning.message).partition(",")[0] for warning in told] == [
        "the device held 700 B (after pass 7",
        "the limit of 400 B cannot be kept any more: 750 B are needed with every saved tensor swapped; training goes "
        "on with as little as that",
    ]
    assert planner.plan.forecast.resident_peak == 750
    assert planner.peaks.over == planner.peaks.most - 400 == 350
    assert planner.peaks.where == "pass 8, module 'block.1'"
    assert not run(planner, [50] * 8, other=100).plan.forecast.resident_peak > 400, "as soon as it can be kept, it is"


def test_a_peak_above_the_limit_tightens_the_plan(make: Planner) -> None:
    planner = make(limit=900)
    run(planner, [50] * 8, other=600)
    before = len(planner.plan.moves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run(planner, [50] * 8, other=600)  # 1000 at its peak, as nothing really moves here
    assert len(planner.plan.moves) >= before > 0
    assert planner.plan.limit == 900


def test_later_passes_are_not_measured(make: Planner) -> None:
    planner = make(budget=200)
    for _ in range(6):
        run(planner, [100] * 6)
    assert not planner.begin(("write", 0, 100), 0)[1].measure
    assert planner.begin(("write", 0, 90), 0)[1].measure, "what is new is"


def test_shapes_for_which_there_is_plenty_of_room_cost_no_plan(make: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = make(limit=10_000)
    for size in range(100, 110):
        run(planner, [size] * 6)
    made = planner.replans
    for size in range(90, 150):
        run(planner, [size] * 6)
    assert planner.replans == made
    assert not planner.begin(("write", 0, 70), 0)[1].measure
    assert planner.client.wanted == 149 * 6


@pytest.mark.parametrize(("rate", "kept"), [(1e6, 200), (1.0, 50)])
def test_state_stays_as_far_as_that_makes_the_forecast_shorter(
    make: Planner, tier: object, rate: float, kept: int
) -> None:
    tier.link = lambda: Link("", rate, rate, latency=0.0)
    planner = make(limit=700, state=200)
    run(planner, [100] * 6)
    assert planner.kept_state.nbytes == 0
    run(planner, [100] * 6)
    assert planner.kept_state.nbytes == kept


@pytest.mark.filterwarnings("ignore:the device held")
def test_all_state_leaves_once_the_limit_has_no_room_for_what_stays(make: Planner, tier: object) -> None:
    tier.link = lambda: Link("", 1e6, 1e6, latency=0.0)
    planner = make(limit=700, state=200)
    for _ in range(4):
        run(planner, [100] * 6)
    assert planner.kept_state.nbytes == 200
    run(planner, [100] * 6, other=650)
    assert planner.kept_state.nbytes == 0
    for _ in range(3):  # the state has left, and that was not enough
        planner.progress.step(0.0, 0, clocked=False)
    with pytest.warns(RuntimeWarning, match="cannot be kept any more"):
        run(planner, [100] * 6, other=650)


def test_state_that_comes_later_is_divided_then(make: Planner, tier: object) -> None:
    tier.link = lambda: Link("", 1e6, 1e6, latency=0.0)
    planner = make(limit=700)
    run(planner, [100] * 6)
    run(planner, [100] * 6)
    planner.kept_state._state.wanted = 200
    for _ in range(2):
        run(planner, [100] * 6)
    assert planner.kept_state.nbytes == 200


def test_what_stays_leaves_room_for_the_largest_operation(make: Planner, tier: object) -> None:
    tier.link = lambda: Link("", 1e6, 1e6, latency=0.0)
    planner = make(limit=700, state=400)
    room = StateRoom(planner, planner.kept_state._state, part=0, passes=True)
    for _ in range(4):
        run(planner, [100] * 6)
    assert planner.kept_state.nbytes == room.now() == 300, "400 and one tensor in hand are more than the limit"
    run(planner, [100] * 6, other=400)
    assert room.now() == planner.budget.planned(0) - 400 - planner.above - 100 < 300


def test_what_disturbs_single_passes_counts_for_no_choice_of_modules(make: Planner) -> None:
    planner = make(budget=200)
    for at in (0, 3, 5, 3):
        run(planner, [100] * 6, pause_at=at)
    assert planner.trace is not None
    assert planner.trace.seconds == 33.0, "the median of the fourth stretch"
    assert planner.undisturbed is not None
    assert planner.undisturbed.seconds == 13.0


def drifts(planner: PassPlanner) -> list[str]:
    """What new plans since the last call were made for."""
    found = [plan.drift for plan in planner.news if plan.drift]
    planner.news.clear()
    return found


def test_a_plan_is_made_anew_when_the_link_has_become_slower(make: Planner, tier: object) -> None:
    planner = make(budget=200)
    for _ in range(10):
        run(planner, [100] * 6)
    assert not drifts(planner)
    link = tier.link()
    slower = link.scaled(0.5)
    tier.link = lambda: slower
    for _ in range(3 * TIMED_EVERY):
        run(planner, [100] * 6)
    (drift,) = drifts(planner)
    assert drift.startswith("copies back take 2.00 x as long")
    assert planner.trace is not None
    assert planner.trace.link == slower.to_dict()


def test_a_plan_is_made_anew_from_passes_that_compute_twice_as_long(make: Planner) -> None:
    planner = make(budget=200)
    for gap in [1.0] * 10 + [2.0] * 3 * TIMED_EVERY:
        run(planner, [100] * 6, gap=gap)
    (drift,) = drifts(planner)
    assert drift.startswith("computation takes 2.00 x as long")
    assert planner.trace is not None
    assert planner.trace.accesses[3].seconds == 2.0
    assert planner.plan is not None
    assert planner.plan.forecast.seconds == pytest.approx(2.0 * 13)


def test_a_computer_that_is_now_fast_now_slow_has_few_new_plans(make: Planner) -> None:
    planner = make(budget=200)
    for number in range(1000):
        run(planner, [100] * 6, gap=1.0 + number // 40 % 2)
    assert 1 <= len(drifts(planner)) <= 6


def test_pauses_that_come_now_here_now_there_are_no_drift(make: Planner) -> None:
    planner = make(budget=200)
    rng = random.Random(24)
    for _ in range(20 * TIMED_EVERY):
        run(planner, [100] * 6, pause_at=rng.randrange(12))
    assert not drifts(planner)


def test_shapes_that_take_turns_are_all_timed(make: Planner) -> None:
    planner = make(budget=200)
    shapes = [[100 + size] * 6 for size in range(4)]
    timed = set()
    for _ in range(2 * TIMED_EVERY):
        for sizes in shapes:
            guide = run(planner, sizes)
            if guide is not None and guide.passes > 4 and planner.last is planner.last_timed:
                timed.add(sizes[0])
    assert timed == {sizes[0] for sizes in shapes}


def test_what_one_plan_is_suspected_of_is_not_held_against_the_next(make: Planner) -> None:
    planner = make(budget=200)
    for gap in [1.0] * 10 + [2.0] * TIMED_EVERY:
        run(planner, [100] * 6, gap=gap)
        if planner.current is not None and planner.current.drift.suspected:
            break
    guide = planner.current
    assert guide is not None
    assert guide.drift.suspected
    guide.follow(guide.trace, guide.plan)
    assert not guide.drift.suspected


def test_the_times_of_a_device_that_is_behind_are_read_later(make: Planner, machine: object) -> None:
    planner = make(budget=200)
    for _ in range(10):
        run(planner, [100] * 6)
    machine.reached = lambda mark: False
    for _ in range(3 * TIMED_EVERY):
        run(planner, [100] * 6, gap=2.0)
    assert not drifts(planner)
    machine.reached = lambda mark: mark < machine.now
    for _ in range(3 * TIMED_EVERY):
        run(planner, [100] * 6, gap=2.0)
    assert len(drifts(planner)) == 1
