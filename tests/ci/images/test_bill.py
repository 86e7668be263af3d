from images.bill import operating_system

RELEASE = 'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\nVERSION_ID="12"\n'
STATUS = """Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1+b3
Description: a tiny init
 with another line: of text

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: libstdc++6
Status: hold ok installed
Architecture: amd64
Version: 1:12.2.0-14
"""


def test_debians_packages_are_listed_with_their_urls_and_those_that_are_gone_are_not() -> None:
    system, *packages = operating_system(RELEASE, STATUS)
    assert (system["type"], system["name"], system["version"]) == ("operating-system", "debian", "12")
    assert [(one["name"], one["version"]) for one in packages] == [
        ("tini", "0.19.0-1+b3"),
        ("libstdc++6", "1:12.2.0-14"),
    ]
    assert [one["purl"] for one in packages] == [
        "pkg:deb/debian/tini@0.19.0-1%2Bb3?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14?arch=amd64&distro=debian-12",
    ]
