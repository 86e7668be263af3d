"""When a pass is over although a graph stays open."""

from __future__ import annotations

import pytest

from lms.core.turns import MOST_TURNS, OLD_BACKWARDS, OLD_ROUNDS, WARM_UP, Rounds, Turns


@pytest.fixture
def rounds() -> Rounds:
    """Of one optimizer, 0, which is known."""
    rounds = Rounds()
    for _ in range(WARM_UP):
        rounds.step(0)
    return rounds


def forward(turns: Turns, *records: int) -> None:
    for record in records:
        turns.save(record)


def backward(turns: Turns, number: int, *records: int) -> None:
    for record in records:
        turns.use(record, number)


def test_a_forward_and_a_backward_under_way_are_one_pass(rounds: Rounds) -> None:
    turns = Turns(rounds)
    assert not turns.take_turn()
    forward(turns, 0, 1)
    assert not turns.take_turn()
    backward(turns, 1, 1)
    rounds.step(0)  # of an optimizer that works in the backward
    assert not turns.take_turn()


def test_after_a_step_a_graph_that_was_used_is_of_the_step_before(rounds: Rounds) -> None:
    turns = Turns(rounds)
    forward(turns, 0, 1)
    backward(turns, 1, 1, 0)
    rounds.step(0)
    assert turns.take_turn()


def test_a_second_loss_of_the_same_step_belongs_to_it(rounds: Rounds) -> None:
    turns = Turns(rounds)
    forward(turns, 0, 1)
    backward(turns, 1, 1, 0)
    assert not turns.take_turn()
    forward(turns, 2)
    backward(turns, 2, 2, 0)
    rounds.step(0)
    assert turns.take_turn()


@pytest.mark.parametrize("critic_steps", [1, 2, 7])
def test_a_generators_graph_belongs_to_the_pass_through_its_critics_steps(critic_steps: int) -> None:
    rounds = Rounds()
    for number in range(20):
        turns = Turns(rounds)
        forward(turns, 0, 1)  # the generator's
        for step in range(critic_steps):
            assert not turns.take_turn()
            forward(turns, 2)
            backward(turns, 10 * number + step, 2)
            turns.free(2)
            rounds.step(1)
        assert not turns.take_turn()
        forward(turns, 3)
        backward(turns, 10 * number + 9, 3, 1, 0)
        rounds.step(0)


def test_a_record_that_is_saved_again_waits_again(rounds: Rounds) -> None:
    turns = Turns(rounds)
    forward(turns, 0)
    backward(turns, 1, 0)
    rounds.step(0)
    forward(turns, 0)
    assert not turns.take_turn()


def test_a_graph_that_is_never_used_is_forgotten_after_some_steps(rounds: Rounds) -> None:
    turns = Turns(rounds)
    forward(turns, 0)
    for number in range(OLD_ROUNDS):
        assert not turns.take_turn()
        forward(turns, 1)
        backward(turns, number, 1)
        turns.free(1)
        rounds.step(0)
    assert turns.take_turn()


def test_without_an_optimizer_it_takes_several_turns() -> None:
    turns = Turns(Rounds())
    for number in range(MOST_TURNS - 1):
        forward(turns, number)
        backward(turns, number, number)
        assert not turns.take_turn()
    forward(turns, MOST_TURNS)
    backward(turns, MOST_TURNS, MOST_TURNS)
    assert turns.take_turn()


def test_without_an_optimizer_a_graph_that_is_never_used_is_forgotten_after_many_backwards() -> None:
    turns = Turns(Rounds())
    forward(turns, 0)
    over = 0
    for number in range(OLD_BACKWARDS + MOST_TURNS):
        over = over or number * turns.take_turn()
        forward(turns, 1)
        backward(turns, number, 1)
        turns.free(1)
    assert over == OLD_BACKWARDS + MOST_TURNS - 1


def test_if_nothing_is_live_nothing_is_left_open(rounds: Rounds) -> None:
    turns = Turns(rounds)
    forward(turns, 0)
    backward(turns, 1, 0)
    turns.free(0)
    rounds.step(0)
    assert not turns.take_turn()


def test_an_optimizer_that_steps_no_more_ends_no_round() -> None:
    rounds = Rounds()
    for _ in range(WARM_UP):
        rounds.step(0)
        rounds.step(1)
    before = rounds.count
    for _ in range(10):
        rounds.step(0)
    assert rounds.count <= before + 1
