"""The chart as helm renders it, and Kubernetes' judgement of it, for the tests beside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CHART = ROOT / "envs/chart"
TOOLS = ROOT / "out/tools"
KUBERNETES = ("1.31", "1.37")  # the oldest that Chart.yaml allows, and the newest whose schemas we have

Object = dict[str, Any]  # one object of Kubernetes, as YAML says it

IMAGE = {"repository": "registry.example/train/bascule-base", "tag": "0.1.0-cpu-py311"}
ONE_POD: Object = {"image": IMAGE, "command": ["python", "train.py"]}
PLAIN: Object = {**ONE_POD, "ddl": {"enabled": True, "hosts": 2, "sshKeySecret": "keys"}}
MPIJOB: Object = {**ONE_POD, "mode": "mpijob", "ddl": {"enabled": True, "hosts": 2}}


@dataclass(frozen=True)
class Helm:
    """One Helm; `folder` takes what it writes."""

    program: Path
    folder: Path

    def run(self, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run it, with no configuration but its own folder's."""
        environment = {"HOME": str(self.folder), "PATH": "/usr/bin:/bin"}
        command = [self.program, *arguments]
        return subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=100)

    def template(
        self, values: Object, *arguments: str, release: str = "job", chart: Path = CHART
    ) -> subprocess.CompletedProcess[str]:
        """`helm template` with these values (JSON is YAML)."""
        return self.run("template", release, chart, "--values", "-", *arguments, stdin=json.dumps(values))

    def render(self, values: Object, release: str = "job", *arguments: str) -> dict[str, Object]:
        """The objects that the chart makes of these values, by "KIND/NAME"; RUN stands for the digits of the run."""
        done = self.template(values, *arguments, release=release)
        assert done.returncode == 0, done.stderr
        objects = self.parse(without_run(done.stdout))
        named = {f"{one['kind']}/{one['metadata']['name']}": one for one in objects}
        assert len(named) == len(objects), "two objects have the same name"
        return named

    def notes(self, values: Object) -> str:
        """What `helm install` would print, rendered as a ConfigMap: helm itself prints it only where a cluster is."""
        chart = self.folder / "chart"
        shutil.copytree(CHART, chart, dirs_exist_ok=True)
        (chart / "templates/NOTES.txt").rename(chart / "notes.txt")
        (chart / "templates/notes.yaml").write_text(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\n"
            'data: {notes: {{ tpl (.Files.Get "notes.txt") . | quote }}}\n'
        )
        done = self.run(
            "template", "job", chart, "--values", "-", "--show-only", "templates/notes.yaml", stdin=json.dumps(values)
        )
        assert done.returncode == 0, done.stderr
        return re.sub(r"(-bascule-)[0-9a-f]{8}\b", r"\1RUN", str(self.parse(done.stdout)[0]["data"]["notes"]))

    @staticmethod
    def parse(text: str) -> list[Object]:
        """The objects in what helm printed."""
        import yaml

        return [one for one in yaml.safe_load_all(text) if one]


def run_of(rendered: str) -> str:
    """The digits by which the objects of a run are called."""
    (run,) = set(re.findall(r'bascule\.run: "([0-9a-f]{8})"', rendered))
    return run


def without_run(rendered: str) -> str:
    """What helm printed with RUN in place of the digits of the run, whose values need not be known."""
    return rendered.replace(run_of(rendered), "RUN")


def pod_templates(rendered: dict[str, Object]) -> dict[str, Object]:
    """Every pod or pod template in the objects, as {"metadata": ..., "spec": ...}, by the name of its container."""
    found: dict[str, Object] = {}
    for one in rendered.values():
        if one["kind"] == "Pod":
            templates = [one]
        elif one["kind"] == "MPIJob":
            templates = [replicas["template"] for replicas in one["spec"]["mpiReplicaSpecs"].values()]
        else:
            templates = [one["spec"]["template"]] if "template" in one.get("spec", {}) else []
        for template in templates:
            (container,) = template["spec"]["containers"]
            assert container["name"] not in found, container["name"]
            found[container["name"]] = template
    return found


def validate(rendered: dict[str, Object]) -> None:
    """Raise where an object, or a pod in it, is not what the API server takes: a field that it does not know, too."""
    import jsonschema
    import kubernetes_validate

    schema = json.loads((Path(__file__).parent / "mpijob.schema.json").read_text())
    monitor = json.loads((Path(__file__).parent / "servicemonitor.schema.json").read_text())
    for one in json.loads(json.dumps(rendered).replace("RUN", "01234567")).values():
        if one["kind"] == "ServiceMonitor":
            jsonschema.validate(one, monitor)
            continue
        if one["kind"] != "MPIJob":
            for version in KUBERNETES:
                kubernetes_validate.validate(one, version, strict=True)
            continue
        jsonschema.validate(one, schema)
        for name, template in pod_templates({"": one}).items():
            wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            for version in KUBERNETES:
                kubernetes_validate.validate(wrapped, version, strict=True)


def merged(values: Object, more: Object) -> Object:
    """`values` with `more` over them, as helm lays values files over one another."""
    both = {**values, **more}
    for name in values.keys() & more.keys():
        if isinstance(values[name], dict) and isinstance(more[name], dict):
            both[name] = merged(values[name], more[name])
    return both
