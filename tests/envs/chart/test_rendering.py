"""What the chart makes of good values, in every mode: judged by Kubernetes' own schemas."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charts import CHART, MPIJOB, ONE_POD, PLAIN, Helm, Object, merged, pod_templates, validate

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
MODES = {"one pod": ONE_POD, "plain": PLAIN, "mpijob": MPIJOB}
OPTIONS: dict[str, Object] = {
    "gpus": {"gpus": 8, "ddl": {"gpusPerHost": 4}},
    "host's network": {"ddl": {"hostNetwork": True, "sshPort": 2022}},
    "volume": {"data": {"size": "10Gi", "storageClass": "fast"}},
    "claim": {"data": {"claim": "scans", "mountPath": "/mnt/scans"}},
    "all the rest": {
        "image": {"pullSecrets": ["registry"], "pullPolicy": "Always"},
        "env": [
            {"name": "EPOCHS", "value": "3"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "wandb"}}},
        ],
        "ddl": {"options": ["-m", "r", "-v"], "waitSeconds": 60},
        "resources": {"requests": {"cpu": 0.5, "memory": "1G"}},
        "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"note": "1"},
        "podLabels": {"team": "mri"},
    },
}


def combined(mode: str, chosen: tuple[str, ...]) -> Object:
    values = MODES[mode]
    for name in chosen:
        values = merged(values, OPTIONS[name])
    if "gpus" in chosen and mode != "one pod":
        values = merged(values, {"ddl": {"hosts": 0}})
    return values


def combinations() -> Iterator[tuple[str, tuple[str, ...]]]:
    for mode in MODES:
        for count in range(len(OPTIONS) + 1):
            for chosen in itertools.combinations(OPTIONS, count):
                if not {"volume", "claim"} <= set(chosen):
                    yield mode, chosen


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_passes_strict_lint_and_kubernetes_schemas(helm: Helm, example: Path) -> None:
    import yaml

    linted = helm.run("lint", "--strict", CHART, "--values", example)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "Fail" not in linted.stdout + linted.stderr  # lint itself only mentions what a render would fail on
    validate(helm.render(yaml.safe_load(example.read_text())))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chosen", [(), ("volume",), tuple(name for name in OPTIONS if name != "volume")], ids=len)
def test_each_mode_passes_with_no_option_and_with_all(helm: Helm, mode: str, chosen: tuple[str, ...]) -> None:
    validate(helm.render(combined(mode, chosen)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_mode_passes_with_every_combination_of_options(helm: Helm) -> None:
    tried = 0
    for mode, chosen in combinations():
        try:
            validate(helm.render(combined(mode, chosen)))
        except Exception as error:
            error.add_note(f"mode {mode!r} with {chosen}")
            raise
        tried += 1
    assert tried == 3 * 24


def test_without_ddl_there_is_one_pod_whatever_the_mode(helm: Helm) -> None:
    for mode in ("plain", "mpijob"):
        rendered = helm.render({**ONE_POD, "mode": mode, "gpus": 2})
        assert set(rendered) == {"Job/job-bascule-1", "Pod/job-bascule-test"}
        (container,) = rendered["Job/job-bascule-1"]["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["python", "train.py"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_plain_makes_named_hosts_and_a_launcher_that_knows_them(helm: Helm) -> None:
    rendered = helm.render(merged(PLAIN, {"ddl": {"hosts": 3, "ranksPerHost": 2, "options": ["-m", "r"]}}))
    assert set(rendered) == {
        "Service/job-bascule-workers",
        "ConfigMap/job-bascule-hosts",
        "StatefulSet/job-bascule-worker",
        "Job/job-bascule-launcher-1",
        "Pod/job-bascule-test",
    }
    hosts = rendered["StatefulSet/job-bascule-worker"]
    service = rendered["Service/job-bascule-workers"]
    assert rendered["ConfigMap/job-bascule-hosts"]["data"]["hostfile"].splitlines() == [
        f"{hosts['metadata']['name']}-{number}.{service['metadata']['name']} slots=2" for number in range(3)
    ]
    assert hosts["spec"]["replicas"] == 3
    assert hosts["spec"]["serviceName"] == service["metadata"]["name"]
    labels = hosts["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], hosts["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        for name, template in pod_templates(rendered).items():
            assert name == "worker" or not selector.items() <= template["metadata"]["labels"].items()
    pods = pod_templates(rendered)
    assert args(pods["worker"]) == ["serve"]
    assert args(pods["launcher"]) == ["launch", "ddlrun", "-m", "r", "--", "python", "train.py"]
    assert args(pods["test"]) == ["launch", "ddlrun", "doctor"]


def test_the_hosts_of_a_job_on_gpus_follow_from_their_number(helm: Helm) -> None:
    values = {**PLAIN, "gpus": 8, "ddl": {"enabled": True, "gpusPerHost": 4, "sshKeySecret": "keys"}}
    rendered = helm.render(values)
    assert rendered["StatefulSet/job-bascule-worker"]["spec"]["replicas"] == 2
    assert rendered["ConfigMap/job-bascule-hosts"]["data"]["hostfile"].count("slots=4") == 2
    pods = pod_templates(rendered)
    for kind in ("limits", "requests"):
        assert resources(pods["worker"])[kind]["nvidia.com/gpu"] == 4
        assert "nvidia.com/gpu" not in resources(pods["launcher"])[kind]


def test_mpijob_leaves_hosts_and_keys_to_the_operator(helm: Helm) -> None:
    rendered = helm.render({**MPIJOB, "gpus": 8, "ddl": {"enabled": True, "gpusPerHost": 4}})
    assert set(rendered) == {"MPIJob/job-bascule", "Pod/job-bascule-test"}
    spec = rendered["MPIJob/job-bascule"]["spec"]
    assert spec["slotsPerWorker"] == 4
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    pods = pod_templates(rendered)
    for name in ("launcher", "worker"):
        mounts = {mount["mountPath"] for mount in container(pods[name])["volumeMounts"]}
        assert not mounts & {spec["sshAuthMountPath"], "/etc/mpi"}  # the operator mounts its own there
    assert args(pods["launcher"])[:2] == ["launch", "ddlrun"]


@pytest.mark.parametrize("values", [PLAIN, MPIJOB], ids=["plain", "mpijob"])
def test_the_port_and_the_network_reach_every_host_and_the_launcher(helm: Helm, values: Object) -> None:
    pods = pod_templates(helm.render(merged(values, {"ddl": {"sshPort": 2022, "hostNetwork": True}})))
    for name in ("worker", "launcher"):
        assert {"name": "BASCULE_SSH_PORT", "value": "2022"} in container(pods[name])["env"]
        assert pods[name]["spec"]["hostNetwork"] is True
        assert pods[name]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    # Declared, so that no two hosts are put on one node, where they would want the same port.
    assert container(pods["worker"])["ports"] == [{"name": "ssh", "containerPort": 2022}]


@pytest.mark.parametrize(
    ("values", "mode"),
    [(ONE_POD, "ReadWriteOnce"), (PLAIN, "ReadWriteMany"), (merged(PLAIN, {"ddl": {"hosts": 1}}), "ReadWriteOnce")],
    ids=["one pod", "two hosts", "one host"],
)
def test_a_new_volume_can_be_mounted_by_all_hosts_and_outlives_the_release(
    helm: Helm, values: Object, mode: str
) -> None:
    rendered = helm.render(merged(values, {"data": {"size": "10Gi"}}))
    claim = rendered["PersistentVolumeClaim/job-bascule-data"]
    assert claim["spec"]["accessModes"] == [mode]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for template in pod_templates(rendered).values():
        (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "data")
        assert volume["persistentVolumeClaim"]["claimName"] == "job-bascule-data"
        assert container(template)["workingDir"] == "/data"


def test_the_longest_release_name_leaves_every_name_within_its_bound(helm: Helm) -> None:
    for values in (PLAIN, MPIJOB):
        rendered = helm.render(values, release="r" * 53)
        validate(rendered)
        names = [name.partition("/")[2] for name in rendered]
        assert max(map(len, names)) + len("-4294967296") <= 63


def test_the_notes_say_how_to_follow_to_end_and_to_test(helm: Helm) -> None:
    for values, words in (
        (ONE_POD, ("logs -f job/job-bascule-1", "helm -n default test job")),
        (merged(PLAIN, {"data": {"size": "1Gi"}}), ("job/job-bascule-launcher-1", "uninstall job", "delete pvc")),
        (MPIJOB, ("get mpijob job-bascule",)),
    ):
        notes = helm.notes(values)
        assert all(word in notes for word in words), notes
        assert "{{" not in notes
        assert "%!" not in notes


def test_the_package_holds_the_chart_and_nothing_else(helm: Helm, tmp_path: Path) -> None:
    import tarfile

    done = helm.run("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("bascule-*.tgz")
    with tarfile.open(package) as archive:
        packed = {name.removeprefix("bascule/") for name in archive.getnames()}
    sources = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert packed == sources


def container(template: Object) -> Any:
    (only,) = template["spec"]["containers"]
    return only


def args(template: Object) -> Any:
    return container(template)["args"]


def resources(template: Object) -> Any:
    return container(template)["resources"]
