"""When a pass is over although a graph stays open."""

from __future__ import annotations

from lms.torch.turns import MOST_TURNS, OLD_BACKWARDS, OLD_STEPS, Turns


def forward(turns: Turns, *records: int) -> None:
    for record in records:
        turns.save(record)


def backward(turns: Turns, number: int, *records: int) -> None:
    for record in records:
        turns.use(record, number)


def test_a_forward_and_a_backward_under_way_are_one_pass() -> None:
    turns = Turns()
    assert not turns.over()
    forward(turns, 0, 1)
    assert not turns.over()
    backward(turns, 1, 1)
    turns.step()  # of an optimizer that works in the backward
    assert not turns.over()


def test_after_a_step_a_graph_that_was_used_is_of_the_step_before() -> None:
    turns = Turns()
    forward(turns, 0, 1)
    backward(turns, 1, 1, 0)
    turns.step()
    assert turns.over()


def test_a_second_loss_of_the_same_step_belongs_to_it() -> None:
    turns = Turns()
    forward(turns, 0, 1)
    backward(turns, 1, 1, 0)
    assert not turns.over()
    forward(turns, 2)
    backward(turns, 2, 2, 0)
    turns.step()
    assert turns.over()


def test_a_graph_that_waits_for_its_backward_belongs_to_the_pass_through_another_models_step() -> None:
    turns = Turns()
    forward(turns, 0, 1)  # the generator's
    forward(turns, 2)
    backward(turns, 1, 2)
    turns.free(2)
    turns.step()  # the discriminator's
    assert not turns.over()
    forward(turns, 3)
    backward(turns, 2, 3, 1, 0)
    turns.step()
    assert turns.over()


def test_a_record_that_is_saved_again_waits_again() -> None:
    turns = Turns()
    forward(turns, 0)
    backward(turns, 1, 0)
    turns.step()
    forward(turns, 0)
    assert not turns.over()


def test_a_graph_that_is_never_used_is_forgotten_after_some_steps() -> None:
    turns = Turns()
    forward(turns, 0)
    for step in range(OLD_STEPS):
        assert not turns.over()
        forward(turns, 1)
        backward(turns, step, 1)
        turns.free(1)
        turns.step()
    assert turns.over()


def test_without_an_optimizer_it_takes_several_turns() -> None:
    turns = Turns()
    for number in range(MOST_TURNS - 1):
        forward(turns, number)
        backward(turns, number, number)
        assert not turns.over()
    forward(turns, MOST_TURNS)
    backward(turns, MOST_TURNS, MOST_TURNS)
    assert turns.over()


def test_without_an_optimizer_a_graph_that_is_never_used_is_forgotten_after_many_backwards() -> None:
    turns = Turns()
    forward(turns, 0)
    over = 0
    for number in range(OLD_BACKWARDS + MOST_TURNS):
        over = over or number * turns.over()
        forward(turns, 1)
        backward(turns, number, 1)
        turns.free(1)
    assert over == OLD_BACKWARDS + MOST_TURNS - 1


def test_when_nothing_is_live_nothing_is_left_open() -> None:
    turns = Turns()
    forward(turns, 0)
    backward(turns, 1, 0)
    turns.free(0)
    turns.step()
    assert not turns.over()
