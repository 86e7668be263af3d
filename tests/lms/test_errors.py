"""What errors promise to those who catch them."""

import pytest

from lms.errors import CorruptionError, LimitError, LMSError, SpillError, UsageError

ALL = (LMSError, UsageError, LimitError, SpillError, CorruptionError)


@pytest.mark.parametrize("error", ALL)
def test_every_error_can_be_caught_as_lms_error(error: type[LMSError]) -> None:
    assert issubclass(error, LMSError)


def test_every_kind_of_error_has_an_exit_status_of_its_own() -> None:
    statuses = [error.exit_status for error in ALL]
    assert len(set(statuses)) == len(statuses)
    assert all(0 < status < 126 for status in statuses)  # from 126 on they are the shell's


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(UsageError, ValueError), (LimitError, MemoryError), (SpillError, OSError), (CorruptionError, OSError)],
)
def test_an_error_is_also_the_builtin_that_a_caller_would_expect(
    error: type[LMSError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match=r"^what happened$"):
        raise error("what happened")
