"""From conda-build's recipe (meta.yaml) to rattler-build's (recipe.yaml).

The subset that is understood is what stands in the tables below. A key that is not there is an error with its file and
line: dropped in silence, a misspelt `run_export` would make a package that installs and breaks others.
Sources: conda-build's documentation, "Defining metadata (meta.yaml)"; rattler-build's, "Converting a recipe from
conda-build".
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from bundle.errors import RecipeError
from bundle.located import Document, List, Map, Node, Text, read

Value = str | int | bool | list["Value"] | dict[str, "Value"]

_ABOUT = {
    "license": "license",
    "license_family": "license_family",
    "license_file": "license_file",
    "summary": "summary",
    "description": "description",
    "home": "homepage",
    "doc_url": "documentation",
    "dev_url": "repository",
}
_REQUIREMENTS = {"build": "build", "host": "host", "run": "run", "run_constrained": "run_constraints"}
_NOARCH = ("python", "generic")
_TOP = ("package", "source", "build", "requirements", "test", "outputs", "about", "extra")
_OUTPUT = ("name", "version", "script", "build", "requirements", "test", "about")
_BUILD = ("number", "string", "script", "noarch", "skip", "entry_points", "run_exports", "include_recipe")
_TEST = ("imports", "commands", "requires", "files")


def render(path: Path, variants: Collection[str]) -> dict[str, Value]:
    """The recipe at `path` as rattler-build reads it; `variants` are the names of conda_build_config.yaml.

    Raises RecipeError with file and line for everything that is not understood.
    """
    return _Rendering(read(path, variants)).recipe()


class _Rendering:
    def __init__(self, document: Document) -> None:
        self.document = document

    def recipe(self) -> dict[str, Value]:
        """The whole document."""
        root = self.document.root
        self.known(root, _TOP, "a recipe")
        if "package" not in root.entries:
            self.fail(root.line, "package: is missing")
        made: dict[str, Value] = {"schema_version": 1}
        if self.document.context:
            made["context"] = dict(self.document.context)
        package = self.map(root, "package")
        self.known(package, ("name", "version"), "package")
        named: dict[str, Value] = {key: self.text(package, key) for key in ("name", "version")}
        if "outputs" not in root.entries:
            made["package"] = named
            return made | self.body(root)
        # The package above the outputs is none itself. Its parts hold for all outputs where they are about all.
        for key in ("requirements", "test"):
            if key in root.entries:
                self.fail(root.lines[key], f"{key} of a recipe with outputs belongs to an output")
        made["recipe"] = named
        body = self.body(root)
        outputs = root.entries["outputs"]
        if not isinstance(outputs, List):
            self.fail(root.lines["outputs"], "outputs: expected a list, an output an item")
        made["outputs"] = [self.output(item, named["version"]) for item in outputs.items]
        return made | body

    def output(self, node: Node, version: Value) -> Value:
        """One output of several."""
        if not isinstance(node, Map):
            self.fail(node.line, "an output is a mapping with name:, requirements: ...")
        self.known(node, _OUTPUT, "an output")
        package: dict[str, Value] = {"name": self.text(node, "name"), "version": version}
        if "version" in node.entries:
            package["version"] = self.text(node, "version")
        body = self.body(node)
        if "script" in node.entries:
            build = body.setdefault("build", {})
            assert isinstance(build, dict)
            build["script"] = self.text(node, "script")
        return {"package": package, **body}

    def body(self, node: Map) -> dict[str, Value]:
        """What a recipe and an output have in common."""
        made: dict[str, Value] = {}
        requirements: dict[str, Value] = {}
        if "source" in node.entries:
            made["source"] = self.source(node)
        if "build" in node.entries:
            made["build"] = self.build(self.map(node, "build"), requirements)
        if "requirements" in node.entries:
            self.requirements(self.map(node, "requirements"), requirements, made)
        if requirements:
            made["requirements"] = requirements
        if "test" in node.entries:
            made["tests"] = self.tests(self.map(node, "test"))
        if "about" in node.entries:
            about = self.map(node, "about")
            self.known(about, _ABOUT, "about")
            made["about"] = {_ABOUT[key]: self.text(about, key) for key in about.entries}
        if "extra" in node.entries:
            extra = self.map(node, "extra")
            made["extra"] = {key: self.plain(value) for key, value in extra.entries.items()}
        return made

    def source(self, node: Map) -> Value:
        """Only files and folders of the tree: nothing that we build is downloaded."""
        value = node.entries["source"]
        items = value.items if isinstance(value, List) else (value,)
        made: list[Value] = []
        for item in items:
            if not isinstance(item, Map):
                self.fail(item.line, "source: expected a mapping with path:, or a list of such")
            self.known(item, ("path", "folder"), "source")
            # conda-build copies all that is there. What git ignores is kept out of what this path comes to name.
            one: dict[str, Value] = {"path": self.text(item, "path"), "use_gitignore": False}
            if "folder" in item.entries:
                one["target_directory"] = self.text(item, "folder")
            made.append(one)
        return made

    def build(self, node: Map, requirements: dict[str, Value]) -> Value:
        """build:, of which run_exports belongs to the requirements there."""
        self.known(node, _BUILD, "build")
        made: dict[str, Value] = {}
        for key in node.entries:
            match key:
                case "number":
                    made["number"] = self.number(node, key)
                case "string" | "script":
                    made[key] = self.text(node, key)
                case "noarch":
                    made["noarch"] = self.text(node, key)
                    if made["noarch"] not in _NOARCH:
                        self.fail(node.lines[key], f"noarch: expected one of {', '.join(_NOARCH)}, found {made[key]!r}")
                case "include_recipe":
                    # The builder gets a copy of the recipe without the tree around it: there is nothing to leave out.
                    if self.text(node, key) != "false":
                        self.fail(node.lines[key], "include_recipe: expected false, or no such line")
                case "skip":
                    made["skip"] = self.skip(node)
                case "entry_points":
                    made["python"] = {"entry_points": self.list(node, key)}
                case "run_exports":
                    requirements["run_exports"] = {"weak": self.list(node, key)}
        return made

    def skip(self, node: Map) -> Value:
        value = node.entries["skip"]
        if not isinstance(value, Text) or value.value.lower() != "true" or value.condition is None:
            self.fail(node.lines["skip"], "skip: expected `true` with a selector, such as `skip: true  # [win]`")
        return [value.condition]

    def requirements(self, node: Map, made: dict[str, Value], body: dict[str, Value]) -> None:
        """requirements:, in which conda-build pins a bare `python` of run to the one of host."""
        self.known(node, _REQUIREMENTS, "requirements")
        for key in node.entries:
            made[_REQUIREMENTS[key]] = self.list(node, key)
        build = body.get("build", {})
        assert isinstance(build, dict)
        host, run = made.get("host", []), made.get("run", [])
        assert isinstance(host, list)
        assert isinstance(run, list)
        if "noarch" not in build and "python" in host and "python" in run:
            # conda-build's default pin_run_as_build, which rattler-build leaves to python's own run_exports.
            run[run.index("python")] = '${{ pin_compatible("python", lower_bound="x.x", upper_bound="x.x") }}'

    def tests(self, node: Map) -> Value:
        """test:, one script, and the imports before it."""
        self.known(node, _TEST, "test")
        made: list[Value] = []
        if "imports" in node.entries:
            made.append({"python": {"imports": self.list(node, "imports"), "pip_check": False}})
        if "commands" in node.entries:
            commands = self.list(node, "commands")
            assert isinstance(commands, list)
            test: dict[str, Value] = {"script": ["set -e", *commands]}  # as conda-build: the first that fails ends it
            if "requires" in node.entries:
                test["requirements"] = {"run": self.list(node, "requires")}
            if "files" in node.entries:
                test["files"] = {"recipe": self.list(node, "files")}
            made.append(test)
        elif unused := {"requires", "files"} & set(node.entries):
            self.fail(node.line, f"test: {' and '.join(sorted(unused))} without commands")
        return made

    # Values -----------------------------------------------------------------------------------------------------------

    def map(self, node: Map, key: str) -> Map:
        value = node.entries[key]
        if not isinstance(value, Map):
            self.fail(node.lines[key], f"{key}: expected a mapping")
        return value

    def text(self, node: Map, key: str) -> str:
        if key not in node.entries:
            self.fail(node.line, f"{key}: is missing")
        value = node.entries[key]
        if not isinstance(value, Text) or not value.value:
            self.fail(node.lines[key], f"{key}: expected text")
        self.unconditional(value)
        return value.value

    def number(self, node: Map, key: str) -> Value:
        value = self.text(node, key)
        if value.startswith("${{"):
            return value
        if not value.isdecimal():
            self.fail(node.lines[key], f"{key}: expected a whole number, found {value!r}")
        return int(value)

    def list(self, node: Map, key: str) -> Value:
        value = node.entries[key]
        if not isinstance(value, List):
            self.fail(node.lines[key], f"{key}: expected a block list, an item a line")
        items: list[Value] = []
        for item in value.items:
            if not isinstance(item, Text) or not item.value:
                self.fail(item.line, f"{key}: expected text in each item")
            if item.condition is None:
                items.append(item.value)
            else:
                items.append({"if": item.condition, "then": item.value})
        return items

    def plain(self, node: Node) -> Value:
        match node:
            case Text():
                return node.value
            case List(items=parts):
                return [self.plain(part) for part in parts]
            case Map(entries=entries):
                return {key: self.plain(value) for key, value in entries.items()}

    def unconditional(self, node: Text) -> None:
        if node.condition is not None:
            self.fail(node.line, "a selector is understood on an item of a list and on build/skip only")

    def known(self, node: Map, keys: Collection[str], where: str) -> None:
        for key in node.entries:
            if key not in keys:
                self.fail(node.lines[key], f"{key!r} is no key of {where} here; there are {', '.join(keys)}")

    def fail(self, line: int, message: str) -> NoReturn:
        raise RecipeError(self.document.path, line, message)
