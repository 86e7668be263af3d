"""What one step wrote, read and freed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lms.core.trace import FIRST_FORMAT, FORMAT, Access, Tensor
from lms.errors import UsageError
from lms.trace import Trace


@pytest.fixture
def trace() -> Trace:
    """Two activations, written one after the other and read in the opposite order, and one that can never move."""
    return Trace(
        tensors=(
            Tensor(100, freed=6, let_go=2, module="first", dtype="float32", shape=(5, 5)),
            Tensor(50, freed=5, module="second"),
            Tensor(9000, freed=4, pinned=True),
        ),
        accesses=(
            Access("write", 0, 0.5, other=7),
            Access("write", 1, 0.25, other=8),
            Access("write", 2, 0.0, other=8),
            Access("read", 2, 0.0, other=9),
            Access("read", 1, 0.125, other=9),
            Access("read", 0, 0.0625, other=10),
        ),
        capacity=1000,
        tail=0.03125,
        tail_other=11,
        cycle=7.0,
        busy=1.5,
        passes=2.0,
        link={"name": "disk", "out": 2.0, "back": 1.0},
        machine={"host": "box"},
    )


def test_totals_count_each_record_once_and_leave_out_what_never_moves(trace: Trace) -> None:
    assert trace.saved == 150
    assert trace.largest == 100
    assert trace.seconds == 0.96875


def test_live_bytes_rise_with_first_saves_and_fall_where_records_are_freed(trace: Trace) -> None:
    assert trace.live == (100, 150, 150, 150, 150, 100)


def test_a_record_that_lives_to_the_end_of_the_pass_is_live_at_its_last_access() -> None:
    trace = Trace((Tensor(10, freed=2),), (Access("write", 0, 1.0), Access("hold", 0, 1.0)))
    assert trace.live == (10, 10)


def test_what_lives_on_in_the_next_step_is_live_at_each_access() -> None:
    state = Tensor(1000, freed=None, kind="optimizer")
    accesses = (Access("write", 0, 1.0), Access("read", 0, 1.0), Access("read", 1, 1.0), Access("write", 1, 1.0))
    trace = Trace((Tensor(10, freed=2), state), accesses)
    trace.check()
    assert trace.live == (1010, 1010, 1000, 1000)
    assert trace.positions(1, "write") == (3,)


def test_an_empty_trace_has_nothing_to_count() -> None:
    empty = Trace((), ())
    assert (empty.saved, empty.largest, empty.seconds, empty.live) == (0, 0, 0.0, ())


def test_a_trace_survives_being_written_and_read(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    trace.save(path)
    assert Trace.load(path) == trace
    assert json.loads(path.read_text())["format"] == FORMAT


def test_a_trace_of_a_version_that_knew_no_cycle_is_read(trace: Trace, tmp_path: Path) -> None:
    document = json.loads(trace.to_json())
    for name in ("cycle", "busy", "passes"):
        del document[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    assert Trace.load(path) == replace(trace, cycle=0.0, busy=0.0, passes=1.0)


def test_a_step_is_its_passes_and_the_rest_of_its_cycle(trace: Trace) -> None:
    one = replace(trace, cycle=7.0, passes=1.0)
    assert one.step_seconds(one.seconds) == 7.0
    assert one.step_seconds(one.seconds + 0.5) == 7.5
    four = replace(trace, cycle=7.0, passes=4.0)
    assert four.step_seconds(four.seconds + 0.5) == 9.0, "each of them takes longer"


def test_without_a_cycle_a_step_is_its_pass(trace: Trace) -> None:
    assert replace(trace, cycle=0.0).step_seconds(3.0) == 3.0


def test_passes_that_took_longer_than_the_cycle_leave_no_rest(trace: Trace) -> None:
    assert replace(trace, cycle=0.5, passes=1.0).step_seconds(3.0) == 3.0


def test_a_missing_trace_is_refused_and_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"TRACE='.*none\.json': No such file .* `lms run --trace FILE`"):
        Trace.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"\xff\xfe", b"[]", b"3", b"{}", b'{"format": "lms-trace-0"}'],
    ids=["empty", "text", "binary", "list", "number", "no format", "other format"],
)
def test_a_file_that_is_no_trace_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"TRACE='.*odd\.json'"):
        Trace.load(path)


@pytest.mark.parametrize(
    "damage",
    [
        {"tensors": None},
        {"tensors": [{"nbytes": 1}]},
        {"accesses": [{"kind": "write"}]},
        {"surprise": 1},
        {"tail": float("nan")},
        {"tail_other": -1},
        {"capacity": 2**63},
        {"cycle": -1.0},
        {"busy": float("inf")},
        {"passes": "2"},
        {"device": None},
        {"link": {"name": "disk", "out": 0, "back": 1}},
        {"machine": {"host": 3}},
    ],
    ids=str,
)
def test_a_damaged_trace_is_refused_by_its_name(damage: dict[str, object], trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**json.loads(trace.to_json()), **damage}))
    with pytest.raises(UsageError, match=r"TRACE='.*damaged\.json'"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("tensors", 0, "nbytes"), "100", r"tensors\[0\]\.nbytes: expected a whole number .* found '100'"),
        (("tensors", 0, "nbytes"), 2**60, r"tensors\[0\]\.nbytes: expected a whole number"),
        (("tensors", 0, "kind"), "saved", r"tensors\[0\]\.kind: expected one of 'activation', .* found 'saved'"),
        (("tensors", 0, "freed"), 9, r"tensors\[0\]\.freed: expected a whole number from 0 to 6"),
        (("tensors", 1, "freed"), 4, r"tensors\[1\]\.freed: 4 is not after its last access"),
        (("tensors", 1, "freed"), None, r"tensors\[1\]\.freed: an activation does not live on"),
        (("tensors", 2, "pinned"), 1, r"tensors\[2\]\.pinned: expected true or false"),
        (("tensors", 2, "module"), "\ud800", r"tensors\[2\]\.module: expected a text"),
        (("accesses", 2, "kind"), "read", r"tensors\[2\]: its first access is no write"),
        (("accesses", 3, "kind"), "free", r"accesses\[3\]\.kind: expected one of 'write', 'hold', 'read'"),
        (("accesses", 3, "seconds"), -1, r"accesses\[3\]\.seconds: expected a number from 0"),
        (("accesses", 3, "tensor"), True, r"accesses\[3\]\.tensor: expected a whole number"),
        (("accesses", 3, "tensor"), 3, r"accesses\[3\]\.tensor: expected a whole number from 0 to 2"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    place: tuple[str, int, str], value: object, words: str, trace: Trace, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.json"
    document = json.loads(trace.to_json())
    document[place[0]][place[1]][place[2]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"damaged .{words}"):
        Trace.load(path)


def test_more_bytes_than_any_device_has_are_refused(tmp_path: Path) -> None:
    tensors = tuple(Tensor(2**47, freed=3) for _ in range(3))
    path = tmp_path / "step.json"
    Trace(tensors, tuple(Access("write", at, 1.0) for at in range(3))).save(path)
    with pytest.raises(UsageError, match="bytes together, more than"):
        Trace.load(path)


def test_a_document_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"TRACE='.*deep\.json': not a JSON file"):
        Trace.load(path)


# The first format

FIRST = {
    "format": FIRST_FORMAT,
    "records": [{"nbytes": 10, "saves": [0, 1], "uses": [2], "freed": 3, "let_go": None}],
    "accesses": [{"kind": kind, "record": 0, "seconds": 1.0, "other": 5} for kind in ("save", "save", "use")],
}


def test_a_file_of_the_first_format_is_read_as_a_pass_of_activations() -> None:
    trace = Trace.from_json(json.dumps(FIRST))
    assert trace.tensors == (Tensor(10, freed=3),)
    assert [access.kind for access in trace.accesses] == ["write", "hold", "read"]
    assert {access.other for access in trace.accesses} == {5}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("records", "saves"), [0], r"records\[0\]\.saves: not the positions"),
        (("records", "uses"), [], r"records\[0\]\.uses: not the positions"),
        (("records", "freed"), None, r"records\[0\]\.freed: expected a whole number"),
        (("accesses", "kind"), "write", r"accesses\[0\]\.kind: expected 'save' or 'use'"),
        (("accesses", "record"), "0", r"accesses\[0\]\.record: expected a whole number"),
    ],
)
def test_a_damaged_file_of_the_first_format_is_refused(place: tuple[str, str], value: object, words: str) -> None:
    document = json.loads(json.dumps(FIRST))
    document[place[0]][0][place[1]] = value
    with pytest.raises(ValueError, match=words):
        Trace.from_json(json.dumps(document))
