"""Questions about the bytes at each access, against the plain loops that they take the place of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lms.core.profile import Excess, lowest

VALUES = st.lists(st.integers(-20, 20), min_size=1, max_size=40)


def stretch(data: st.DataObject, end: int, least: int = 0) -> tuple[int, int]:
    start = data.draw(st.integers(0, end - least))
    return start, data.draw(st.integers(start + least, end))


@given(VALUES, st.data())
def test_an_excess_is_found_in_a_stretch_as_long_as_one_of_its_accesses_has_some(
    values: list[int], data: st.DataObject
) -> None:
    excess = Excess(np.array(values, np.int64))
    for _ in range(data.draw(st.integers(1, 20))):
        start, stop = stretch(data, len(values))
        assert excess.within(start, stop) == any(value > 0 for value in values[start:stop])
        start, stop = stretch(data, len(values))
        nbytes = data.draw(st.integers(0, 10))
        excess.lower(start, stop, nbytes)
        values[start:stop] = [value - nbytes for value in values[start:stop]]


@given(VALUES, st.data())
def test_the_lowest_of_each_stretch_is_the_least_value_in_it(values: list[int], data: st.DataObject) -> None:
    stretches = [stretch(data, len(values), least=1) for _ in range(data.draw(st.integers(0, 20)))]
    starts, stops = np.array(stretches, np.int64).reshape(-1, 2).T
    found = lowest(np.array(values, np.int64), starts, stops)
    assert found.tolist() == [min(values[start:stop]) for start, stop in stretches]
