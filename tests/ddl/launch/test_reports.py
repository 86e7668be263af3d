from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddl.launch.rankfile import Place
from ddl.launch.reports import Reports, Verdict, culprit, diverted, judge

LOOK = "; see what it wrote above; --rank-prefix puts the rank before each line"
PLACES = (Place(0, "a", 0), Place(1, "a", 0), Place(2, "b", 0), Place(3, "b", 0))


def passed(reports: Reports, *chunks: bytes) -> bytes:
    return b"".join([*map(reports.take, chunks), reports.rest()])


def end(rank: int, status: int, asked: bool = False) -> bytes:
    return f"T-1 {rank} {status}{' asked' if asked else ''}\n".encode() * 2


def heard(*ends: tuple[int, int], began: Sequence[int] = (), asked: Sequence[int] = ()) -> Reports:
    reports = Reports("T-1")
    passed(reports, *(f"T-1 {rank} began\n".encode() for rank in began), *(end(*one, one[0] in asked) for one in ends))
    return reports


def test_reports_are_taken_out_and_the_rest_passes_unchanged() -> None:
    reports = Reports("T-1")
    text = passed(reports, b"T-1 0 began\nloss 3.1\n\xff\x00 no end of line" + end(0, 0))
    assert text == b"loss 3.1\n\xff\x00 no end of line"
    assert (reports.began, reports.ended) == ({0}, {0: 0})


def test_a_program_says_that_it_takes_signals() -> None:
    stream = b"T-1 0 began\nW-1 takes signals\nW-2 takes signals\nloss\n"
    for cut in range(len(stream)):
        reports = Reports("T-1", "W-2")
        text = passed(reports, stream[:cut], stream[cut:])
        assert (text, reports.takes_signals, reports.began) == (b"W-1 takes signals\nloss\n", True, {0})
    assert not Reports("T-1").takes_signals


def test_an_environment_in_the_log_does_not_say_that_the_program_takes_signals() -> None:
    reports = Reports("T-1", "W-2")
    stream = b"OMPI_DDLRUN_SIGNALS=W-2\nPATH=/bin\n"
    assert passed(reports, stream) == stream
    assert not reports.takes_signals


@given(st.data())
def test_it_does_not_matter_where_the_stream_is_cut(data: st.DataObject) -> None:
    others = st.sampled_from([b"x", b"T", b"T-1", b"T-1 ", b"\n", b"T-1 7 x\n", b"[0] "])
    pieces = data.draw(st.lists(others, max_size=6))
    stream = b"T-1 3 began\n" + b"".join(pieces)
    whole = Reports("T-1")
    expected = passed(whole, stream + b"|" + end(3, 5))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reports = Reports("T-1")
    stream += b"|" + end(3, 5)
    chunks = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert passed(reports, *chunks) == expected == b"".join(pieces) + b"|"
    assert (reports.began, reports.ended) == (whole.began, whole.ended) == ({3}, {3: 5})


def test_a_line_without_an_end_is_not_kept_waiting() -> None:
    assert Reports("T-1").take(b"epoch 3: 40%\r") == b"epoch 3: 40%\r"
    assert Reports("T-1", tagged=True).take(b"[0] epoch 3: 40% [00:01<00:02, 3it/s]\r") != b""


@pytest.mark.parametrize("cut", range(1, 8))
def test_of_two_copies_one_survives_what_mpi_puts_between_two_pieces(cut: int) -> None:
    reports = Reports("T-1")
    passed(reports, end(0, 0)[:cut], b"loss of rank 1\n", end(0, 0)[cut:])
    assert reports.ended == {0: 0}


@pytest.mark.parametrize("tag", [b"[0]<stderr>: ", b"[1,0]<stderr>:", b"[0] ", b"[prterun-h0-17@1,0]<stderr>: "])
def test_tags_before_reports_are_taken_out_with_them(tag: bytes) -> None:
    began, ended = b"T-1 0 began\n", b"T-1 0 0\n"
    for chunks in (
        [tag + began + tag + b"one\n" + tag + b"two" + tag + ended + tag + ended],
        [tag, began, tag, b"one\n", tag, b"two", tag, ended, tag, ended],
        [tag + began, tag + b"one\n", tag + b"two", ended + tag + ended],
    ):
        reports = Reports("T-1", tagged=True)
        assert passed(reports, *chunks) == tag + b"one\n" + tag + b"two\n"
        assert reports.ended == {0: 0}


def test_every_rank_must_report_0() -> None:
    assert judge(0, heard((0, 0), (1, 0), (2, 0), (3, 0)), PLACES) == Verdict(0)


def test_a_silent_rank_is_named_with_its_host() -> None:
    verdict = judge(0, heard((1, 0), (0, 0), began=[0, 1, 2]), PLACES)
    assert verdict == Verdict(
        1,
        (
            "mpirun returned 0, and 2 of 4 ranks did not report their end: this counts as a failure",
            "host b: ranks 2, 3 began, and nothing came after it",
            "when a host is lost, mpirun abandons the others, too; find it with: ddlrun doctor -H a,b",
        ),
    )
    assert "host b: ranks 2, 3 did not begin" in judge(0, heard((1, 0), (0, 0)), PLACES).said[1]


def test_mpirun_s_own_error_is_no_signal_and_on_one_host_no_loss_of_a_host() -> None:
    verdict = judge(186, heard(), tuple(Place(rank, "a", 0) for rank in range(2)))
    said = "mpirun itself ended with exit status 186, and no rank has reported an error; see its words above"
    assert verdict == Verdict(186, (said, "host a: ranks 0, 1 did not begin"))
    assert judge(128 + 31, heard(), PLACES).said[0].startswith("mpirun itself ended with exit status 159 (signal 31)")


def test_many_silent_hosts_are_not_all_named() -> None:
    places = tuple(Place(rank, f"h{rank // 16}", 0) for rank in range(320))
    said = judge(0, heard(), places).said
    assert len(said) == 11
    assert said[1].startswith("host h0: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more did not begin")
    assert said[-2] == "and 12 more hosts"


def test_a_reported_failure_counts_where_mpirun_returns_0() -> None:
    verdict = judge(0, heard((1, 0), (3, 137), (2, 143), (0, 0), asked=[2]), PLACES)
    said = "rank 3 on b ended with exit status 137 (signal 9), and mpirun returned 0 all the same"
    said += "; if nobody killed it, the kernel did, because memory ran out: see dmesg on b"
    assert verdict == Verdict(137, (said,))


def test_the_rank_that_the_job_failed_for_is_named_and_gives_the_status() -> None:
    reports = heard((1, 143), (3, 7), (2, 143), asked=[1, 2])
    assert judge(7, reports, PLACES) == Verdict(7, (f"rank 3 on b ended with exit status 7{LOOK}",))
    assert judge(1, reports, PLACES).status == 7


def test_mpirun_s_own_failure_counts_unless_every_rank_ended_well() -> None:
    said = "mpirun itself ended with exit status 137 (signal 9), and no rank has reported an error; see its words above"
    verdict = judge(137, heard((0, 0), (1, 0), (2, 0), began=[3]), PLACES)
    assert (verdict.status, verdict.said[0]) == (137, said)
    said = "every rank ended with exit status 0, so the job succeeded; mpirun itself ended with exit status 1"
    assert judge(1, heard((0, 0), (1, 0), (2, 0), (3, 0)), PLACES) == Verdict(0, (said,))
    timed_out = heard((0, 0), (1, 0), (2, 0), (3, 0), asked=[0, 1, 2, 3])  # mpirun's --timeout, and they clean up
    assert judge(110, timed_out, PLACES).status == 110


ABORTED = 'prterun has exited due to process rank 0 with PID 0 on node a calling\n"abort". This may have caused other'
FIRST = "The first process to do so was:\n\n   Process name: [prterun-h0-134@1,2]\n   Exit code:    3\n---"


@pytest.mark.parametrize(
    ("reports", "status", "errors", "cause"),
    [
        (heard((1, 143), (2, 137), asked=[1]), 0, "", 2),  # a rank that was not asked to end is the culprit
        (heard((1, 143), (2, 143), asked=[1, 2]), 0, "", 1),  # else the first
        (heard((0, 14), (1, 134)), 14, ABORTED, 1),  # MPI ended rank 0 because the connection to the other broke
        (heard((0, 14)), 14, ABORTED, 0),
        (heard((0, 1), (1, 1), (3, 139)), 1, "", 3),  # a signal that MPI did not send, before errors that others got
        (heard((0, 1), (1, 1), (2, 3)), 1, FIRST, 2),  # mpirun names it, and returns another's status
        (heard((0, 2), (1, 5)), 5, "", 1),
        (heard((0, 0), (1, 0)), 1, FIRST, None),
    ],
)
def test_the_cause_is_told_from_what_it_caused(reports: Reports, status: int, errors: str, cause: int | None) -> None:
    assert culprit(status, reports, errors) == cause


def test_who_did_not_come_to_ddl_init_is_known_from_those_that_waited() -> None:
    reports = Reports("T-1")
    line = "ddl: rank {} (host a) has waited 10 s in MPI_Init: another rank has not called ddl_init\n"
    text = "".join(line.format(rank) for rank in (0, 1, 3)).encode()
    assert passed(reports, text, end(0, 1)) == text
    assert judge(1, reports, PLACES).said == (
        f"rank 0 on a ended with exit status 1{LOOK}",
        "rank 2 on b did not wait in ddl_init, as the others did",
    )


def test_who_did_not_come_over_tcp_is_what_rank_0_said_last() -> None:
    reports = Reports("T-1")
    line = "ddl: {}ddl_init: rank 0 has waited {} s for {}: not started, or no TCP connection is possible\n"
    text = (line.format("warning: ", 10, "ranks 1, 2, 3") + line.format("", 300, "rank 2")).encode()
    assert passed(reports, text, end(0, 1)) == text
    assert judge(1, reports, PLACES).said[1:] == ("rank 2 on b came late to ddl_init, or not at all",)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--mca btl self,sm", ""),
        ("--output rank,tag", ""),
        ("--mca btl_tcp_if_include 10.0.0.0/24", ""),
        ("--output file=/tmp/x", "file=/tmp/x"),
        ("--output tag,dir=/tmp/x:nocopy", "tag,dir=/tmp/x:nocopy"),
        ("--output=merge", "--output=merge"),
        ("--output rank,merge-stderr-to-stdout", "rank,merge-stderr-to-stdout"),
        ("--merge-stderr-to-stdout", "--merge-stderr-to-stdout"),
        ("-errfile-pattern err.%r", "-errfile-pattern"),
    ],
)
def test_an_option_that_leads_stderr_elsewhere_is_seen(line: str, word: str) -> None:
    assert diverted(line.split()) == word
