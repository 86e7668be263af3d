"""What `make context` writes for an engine elsewhere."""

import re

from images import root
from images.cli import CONTAINERFILE, arguments
from images.containerfile import STAGE, filled, halves
from images.environment import Environment
from images.names import Description


def test_quotes_dollars_and_backslashes_come_through() -> None:
    assert filled("ARG A", {"A": 'a "$b" \\1'}) == 'ARG A="a \\"\\$b\\" \\\\1"'


def test_the_containerfile_has_every_argument_that_it_is_given() -> None:
    described = Description("toy", "localhost/bascule-toy", "1-cpu-py311", "bascule-toy", "as allowed")
    needy = Environment("toy", (), frozenset(), system=("libone", "libtwo"))
    given = arguments(described, needy, "debian:12")
    text = filled(CONTAINERFILE.read_text(), given)
    assert all(f'ARG {name}="{value}"' in text for name, value in given.items())
    assert re.findall(r"^ARG BASE_IMAGE.*$", text, re.MULTILINE) == ['ARG BASE_IMAGE="debian:12"', "ARG BASE_IMAGE"]
    assert 'ARG ENV_NAME="toy"' in text
    assert f'ARG PACKAGES="{" ".join(root.HOST)} libone libtwo"' in text


def test_what_hosts_need_of_debian_is_what_the_containerfile_says_by_itself() -> None:
    assert f'\nARG PACKAGES="{" ".join(root.HOST)}"\n' in CONTAINERFILE.read_text()


def test_the_halves_are_the_whole_and_what_changes_with_a_commit_is_in_the_second() -> None:
    text = CONTAINERFILE.read_text()
    first, second = halves(text)
    assert f"{first}FROM {STAGE}\n{second}" == text
    assert "COPY framework " in first
    assert "COPY ours " in second
    assert "ARG REVISION" not in first
