"""What rattler-build rendered, in the words of conda-build: to be compared with golden/, which is written in those."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ABOUT = {"homepage": "home", "documentation": "doc_url", "repository": "dev_url"}
_PIN = {"lower_bound": "min_pin", "upper_bound": "max_pin"}


def translated(document: Mapping[str, Any], variant: Mapping[str, str], build_hash: str) -> dict[str, Any]:
    """One rendered recipe; a key that is not known here is kept, so that the comparison fails on it."""
    document = {key: value for key, value in document.items() if key not in ("schema_version", "context")}
    made: dict[str, Any] = {"package": document.pop("package")}
    sources = document.pop("source", [])
    for source in sources:
        assert source.pop("use_gitignore") is False  # conda-build copies all
        if "target_directory" in source:
            source["folder"] = source.pop("target_directory")
    if sources:
        made["source"] = sources if len(sources) > 1 else sources[0]
    build = document.pop("build")
    requirements = document.pop("requirements", {})
    if build.get("script") == []:  # nothing is run for an output without a script
        del build["script"]
    if "script" in build:
        build["script"] = build["script"].replace("${{ ", "{{ ")
    if "python" in build:
        build["entry_points"] = build.pop("python").pop("entry_points")
    build["string"] = build["string"].replace(build_hash, "HASH")
    build.pop("skip", None)  # it was not
    exports = requirements.pop("run_exports", None)
    if exports is not None:
        assert set(exports) == {"weak"}
        build["run_exports"] = [_requirement(one, {}) for one in exports["weak"]]
    made["build"] = build
    if "run_constraints" in requirements:
        requirements["run_constrained"] = requirements.pop("run_constraints")
    made["requirements"] = {
        key: [_requirement(one, variant if key == "host" else {}) for one in all_] for key, all_ in requirements.items()
    }
    made["test"] = _test(document.pop("tests", []))
    about = document.pop("about", {})
    if "license_file" in about:
        (about["license_file"],) = about["license_file"]
    made["about"] = {_ABOUT.get(key, key): value for key, value in about.items()}
    return made | document


def _requirement(one: Any, variant: Mapping[str, str]) -> str:
    if isinstance(one, dict):
        ((function, pin),) = one.items()
        words = [function, pin.pop("name")]
        if pin.pop("exact", False):
            words.append("exact")
        return " ".join([*words, *(f"{_PIN[key]}={value}" for key, value in pin.items())])
    text = str(one)
    # A bare name that is a variant gets the variant's value when it is resolved, as conda-build writes it at once.
    if re.fullmatch(r"\w+", text) and text in variant and text != variant.get("mpi"):
        return f"{text} {variant[text]}.*"
    return text


def _test(tests: list[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for test in tests:
        if "python" in test:
            assert test["python"].pop("pip_check") is False
            made |= test["python"]
            continue
        script = test.pop("script")
        assert script[0] == "set -e"
        made["commands"] = script[1:]
        requirements = test.pop("requirements", {})
        if "run" in requirements:
            made["requires"] = requirements.pop("run")
        files = test.pop("files", {})
        if "recipe" in files:
            made["files"] = files.pop("recipe")
        assert not requirements
        assert not files
        made |= test
    return made
