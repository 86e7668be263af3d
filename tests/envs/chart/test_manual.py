"""docs/kubernetes.md against the chart: its options, its values file, and its commands as helm takes them."""

import re
import shlex

from charts import CHART, ROOT, Helm, Object, validate, without_run

MANUAL = (ROOT / "docs/kubernetes.md").read_text()
GROUPS = ("image", "ddl", "metrics", "data")  # whose members the manual describes one by one
COMMANDS = [
    shlex.split(command, comments=True)
    for block in re.findall(r"(?:^    .*\n)+", MANUAL, re.MULTILINE)
    for command in block.replace("\\\n", " ").splitlines()
]


def test_its_table_names_every_option_of_the_chart_and_no_other(tools: object) -> None:
    import yaml

    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    (table,) = re.findall(r"^## Options$(.*?)^##", MANUAL, re.MULTILINE | re.DOTALL)
    firsts = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for first in firsts for name in re.findall("`(.*?)`", first)]
    expected = [f"{name}.{member}" for name in GROUPS for member in values[name]]
    assert sorted(named) == sorted([*expected, *(name for name in values if name not in GROUPS)])


def test_its_values_are_those_of_the_example_that_it_names(tools: object) -> None:
    import yaml

    (shown,) = re.findall(r"^```yaml\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load((CHART / "examples/one_pod.yaml").read_text())


def test_helm_takes_each_of_its_commands_and_makes_what_it_says(helm: Helm) -> None:
    rendered: dict[str, dict[str, Object]] = {}
    given: dict[str, list[str]] = {}
    for _, verb, release, chart, *words in (command for command in COMMANDS if command[0] == "helm"):
        assert (verb in ("install", "upgrade"), chart) == (True, "envs/chart")
        if verb == "upgrade":
            words.remove("--reuse-values")
            words = given[release] + words
        given[release] = [str(ROOT / word) if word.startswith("envs/") else word for word in words]
        done = helm.run("template", release, CHART, *given[release])
        assert done.returncode == 0, done.stderr
        objects = helm.parse(without_run(done.stdout))
        rendered[f"{verb} {release}"] = made = {f"{one['kind']}/{one['metadata']['name']}": one for one in objects}
        validate(made)
    assert list(rendered) == ["install scans", "upgrade scans", "install scans-gpu", "install scans-hosts"]
    for verb, command in (("install", ["sleep", "1h"]), ("upgrade", ["python", "/data/train.py"])):
        job = rendered[f"{verb} scans"]["Job/scans-bascule-RUN"]  # so the pod's name begins
        assert job["spec"]["template"]["spec"]["containers"][0]["args"] == command
    assert rendered["install scans-hosts"]["Job/scans-hosts-bascule-RUN"]["spec"]["completions"] == 2
