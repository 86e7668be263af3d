import pytest

from bascule import pins


@pytest.mark.parametrize(
    ("pin", "version", "expected"),
    [
        ("", "1.0", True),
        ("*", "1.0", True),
        ("==0.1.0", "0.1.0", True),
        ("==0.1.0", "0.1.1", False),
        ("0.1.0", "0.1.0", True),
        ("==1", "1.0.0", True),
        ("2.13.*", "2.13.0", True),
        ("2.13.*", "2.13", True),
        ("2.13.*", "2.130.0", False),
        ("2.13.*", "2.12.9", False),
        ("=2.13", "2.13.1", True),
        ("!=2.13.*", "2.13.1", False),
        (">=3.11,<3.14", "3.11.7", True),
        (">=3.11,<3.14", "3.14.0", False),
        (">=3.11,<3.14", "3.9.18", False),
        (">=3.8|1.2", "1.2", True),
        (">=3.8|1.2", "1.3", False),
        ("<2.0", "2.0rc1", True),
        (">=2.0", "2.0.post1", True),
        (">=2.13,<2.14.0a0", "2.13.0+cpu", True),
        (">=2.13,<2.14.0a0", "2.14.0", False),
    ],
)
def test_a_version_fits_as_it_does_for_conda(pin: str, version: str, expected: bool) -> None:
    assert pins.fits(pin, version, "0") is expected


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        ("0.1.0 h1_0", True),
        ("0.1.0 h2_0", False),
        ("==0.1.0 mpi_mpich_*", False),
        ("==0.1.0 h*", True),
    ],
)
def test_so_does_a_build(pin: str, expected: bool) -> None:
    assert pins.fits(pin, "0.1.0", "h1_0") is expected


@pytest.mark.parametrize("pin", ["~=2.0", "1!2.0", "1.2*", ">=1,"])
def test_a_pin_in_another_form_is_an_error(pin: str) -> None:
    with pytest.raises(ValueError, match="is no pin that is understood"):
        pins.fits(pin, "2.0", "0")
