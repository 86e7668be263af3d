from bundle.bench import _PART, Figure

SAID = """\
bundle: the packages are built against a stand-in for conda-forge (conda-forge does not answer: no route)
bundle: wheels: done in 6.1 s
bundle: stand-in channel: python-3.11.7-0_cpython.conda
bundle: stand-in channel: done in 19.2 s
bundle: channel: lms-0.1.0-pyh1_0.conda: built in 2.0 s (it is not in the channel)
bundle: channel: lms-0.1.0-pyh1_0.conda: tested in 19.0 s (it is not in the channel)
bundle: channel: bascule-0.1.0-h2_0.conda: built in 0.2 s (it is not in the channel)
bundle: channel: done in 113.0 s
"""


def test_the_parts_of_a_run_are_read_from_what_it_says() -> None:
    assert {name: float(seconds) for name, seconds in _PART.findall(SAID)} == {
        "wheels": 6.1, "stand-in channel": 19.2, "lms-0.1.0-pyh1_0.conda: built": 2.0,
        "lms-0.1.0-pyh1_0.conda: tested": 19.0, "bascule-0.1.0-h2_0.conda: built": 0.2,
        "channel": 113.0,
    }  # fmt: skip


def test_a_figure_stands_beside_what_was_promised() -> None:
    assert str(Figure("channel", 139.51, 230.04, 300)) == (
        "channel: 139.5 s, 230.0 s of processors, at most 300 promised"
    )
    assert str(Figure("mirror", 3.5, 2.0)) == "mirror: 3.5 s, 2.0 s of processors"
