"""Values of JSON documents from outside."""

from collections.abc import Callable

import pytest

from lms import documents

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("read", "sound", "wrong"),
    [
        (documents.mapping, [{}, {"a": 1}], [None, [], "{}"]),
        (documents.items, [[], [1]], [None, {}, "[]"]),
        (documents.text, ["", "a", "\u4e2d\u6587", "a\n\tb"], [None, 3, "\ud800", "\x1b[31m", "a\0b", b"a"]),
        (documents.texts, [{}, {"a": "b"}], [{"a": 1}, {"\x1b": "b"}, []]),
        (documents.flag, [True, False], [0, 1, None, "true"]),
        (documents.nbytes, [0, 1, 1 << 48], [-1, (1 << 48) + 1, 1.0, True, "1", None]),
        (documents.seconds, [0, 0.5, 1e9], [-1e-9, 2e9, NAN, INFINITY, True, "1", None]),
        (documents.rate, [1, 2e9, 1e18], [0, 0.5, 1e19, NAN, INFINITY, True, "1"]),
    ],
)
def test_each_kind_of_value_is_told_from_others_with_its_place(
    read: Callable[[object, str], object], sound: list[object], wrong: list[object]
) -> None:
    for value in sound:
        assert read(value, "there") == value
    for value in wrong:
        with pytest.raises(ValueError, match=r"^there.*: expected .*, found "):
            read(value, "there")


def test_what_was_found_is_said_shortly() -> None:
    with pytest.raises(ValueError, match="there: expected a text") as caught:
        documents.text([[1] * 1000] * 1000, "there")
    assert len(str(caught.value)) < 300


def test_a_field_that_is_not_known_is_named() -> None:
    documents.only({"a": 1}, {"a", "b"})
    with pytest.raises(ValueError, match=r"^there: unknown field 'c'$"):
        documents.only({"a": 1, "c": 2}, {"a", "b"}, "there")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_what_is_no_document_is_a_value_error(content: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        documents.parse(content)
