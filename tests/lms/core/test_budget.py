"""Who may hold how much: shares by priority, and what is free of them now."""

import random

import pytest

from lms.core.budget import Budget, Client


def test_one_client_may_hold_all_that_is_not_outside() -> None:
    saved = Client(priority=0, held=300)
    budget = Budget(1000, saved)
    budget.measure(700)
    assert budget.outside == budget.beside(saved) == 400
    assert budget.room(saved, beside=400, spare=0) == budget.share(saved) == 600
    assert budget.room(saved, beside=450, spare=100) == 450
    assert budget.room(saved, beside=1200, spare=0) == 0


def test_of_two_clients_the_first_gets_what_it_wants_and_the_second_the_rest() -> None:
    state, saved = Client(priority=0, wanted=800, needed=100), Client(priority=1, wanted=500, needed=50)
    budget = Budget(1000, state, saved)
    budget.measure(200)
    assert budget.share(saved) == 800 - 100
    assert budget.share(state) == 800 - 500
    saved.wanted = 700  # a larger batch: the state has to give up memory
    assert budget.share(state) == 800 - 700


def test_the_second_of_two_clients_keeps_what_it_needs() -> None:
    state, saved = Client(priority=0, wanted=800, needed=100), Client(priority=1, wanted=5000, needed=50)
    budget = Budget(1000, state, saved)
    assert budget.share(saved) == 900
    assert budget.share(state) == 100


def test_a_share_that_another_client_still_holds_is_not_free() -> None:
    state, saved = Client(priority=0, wanted=800, held=600), Client(priority=1, wanted=500, held=100)
    budget = Budget(1000, state, saved)
    budget.measure(900)
    assert budget.outside == 200
    assert budget.share(saved) == 800
    assert budget.room(saved, budget.beside(saved), spare=0) == 200
    assert budget.share(state) == 300, "so the state has to give up half of what it holds"
    state.held = 300
    budget.measure(600)
    assert budget.room(saved, budget.beside(saved), spare=0) == 500


def test_of_equal_clients_the_first_comes_first() -> None:
    first, second = Client(priority=0, wanted=70), Client(priority=0, wanted=70)
    budget = Budget(100, first, second)
    assert (budget.share(first), budget.share(second)) == (100, 30)


def test_what_clients_want_of_their_shares_always_fits() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(300):
        clients = [Client(chance.randrange(3), wanted=chance.randrange(200)) for _ in range(chance.randrange(1, 5))]
        for client in clients:
            client.needed = chance.randrange(20)
        budget = Budget(chance.randrange(100, 500), *clients)
        budget.measure(chance.randrange(50))
        taken = sum(min(max(client.wanted, client.needed), budget.share(client)) for client in clients)
        if sum(client.needed for client in clients) <= budget.limit - budget.outside:
            assert taken <= budget.limit - budget.outside
            assert all(budget.share(client) >= client.needed for client in clients)


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_client_holds_no_more_than_its_own_bound(limit: int | None) -> None:
    saved = Client(priority=0, most=123)
    assert Budget(limit, saved).room(saved, beside=0, spare=50) == 123


def test_without_any_bound_there_is_room_for_everything() -> None:
    state = Client(priority=0)
    assert Budget(None, state).room(state, beside=10**12, spare=0) > 10**15


def test_a_plan_leaves_a_reserve_free_and_more_of_it_until_a_swap_was_measured() -> None:
    budget = Budget(25_600)
    assert (budget.reserve, budget.planned(0), budget.fits(25_500), budget.fits(25_501)) == (100, 25_100, True, False)
    budget.proven = True
    assert budget.planned(0) == 25_500
    budget.margin = 1000
    assert budget.planned(0) == 24_500
    assert budget.planned(25_000) == 25_000
    assert not budget.fits(24_501)


def test_a_peak_within_the_reserve_is_not_over_the_limit() -> None:
    budget = Budget(25_600)
    assert (budget.over(25_700), budget.over(25_701), Budget(None).over(10**15)) == (0, 101, 0)
