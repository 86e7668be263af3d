"""What the chart makes of good values, in every mode: judged by Kubernetes' own schemas."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charts import CHART, MPIJOB, ONE_POD, PLAIN, Helm, Object, merged, pod_templates, run_of, validate

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
MODES = {"one pod": ONE_POD, "plain": PLAIN, "mpijob": MPIJOB}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
OPTIONS: dict[str, Object] = {
    "gpus": {"gpus": 8, "ddl": {"gpusPerHost": 4}},
    "host's network": {"ddl": {"hostNetwork": True, "sshPort": 2022}},
    "volume": {"data": {"size": "10Gi", "storageClass": "fast"}},
    "claim": {"data": {"claim": "scans", "mountPath": "/mnt/scans"}},
    "all the rest": {
        "image": {"digest": DIGEST, "pullSecrets": ["registry"], "pullPolicy": "Always"},
        "env": [
            {"name": "EPOCHS", "value": "3"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "wandb"}}},
        ],
        "ddl": {"options": ["-m", "r", "-v"], "waitSeconds": 60},
        "resources": {"requests": {"cpu": 0.5, "memory": "1G"}},
        "launcherResources": {"limits": {"cpu": "500m"}, "requests": {"memory": "512Mi"}},
        "sharedMemory": "8Gi",
        "scratch": "200G",
        "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"note": "1"},
        "podLabels": {"team": "mri"},
        "jobLabels": {"kueue.x-k8s.io/queue-name": "mri"},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "runtimeClassName": "nvidia",
        "priorityClassName": "batch",
        "schedulerName": "volcano",
        "serviceAccountName": "trainer",
        "volumes": [{"name": "models", "configMap": {"name": "models"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "retries": 2,
        "deadlineSeconds": 86400,
        "ttlSecondsAfterFinished": 0,
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


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({}, "registry.example/train/bascule-base:0.1.0-cpu-py311"),
        ({"digest": DIGEST}, f"registry.example/train/bascule-base:0.1.0-cpu-py311@{DIGEST}"),
        ({"tag": "", "digest": DIGEST}, f"registry.example/train/bascule-base@{DIGEST}"),
    ],
    ids=["tag", "both", "digest"],
)
@pytest.mark.parametrize("mode", MODES)
def test_every_pod_runs_the_image_of_that_tag_or_digest(helm: Helm, mode: str, image: Object, name: str) -> None:
    rendered = helm.render(merged(MODES[mode], {"image": image}))
    validate(rendered)
    assert {container(template)["image"] for template in pod_templates(rendered).values()} == {name}


def test_without_ddl_there_is_one_pod_whatever_the_mode(helm: Helm) -> None:
    for mode in ("plain", "mpijob"):
        rendered = helm.render({**ONE_POD, "mode": mode, "gpus": 2})
        assert set(rendered) == {"Job/job-bascule-RUN", "Pod/job-bascule-test"}
        (container,) = rendered["Job/job-bascule-RUN"]["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["python", "train.py"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_plain_makes_one_job_of_named_hosts_whose_first_launches(helm: Helm) -> None:
    rendered = helm.render(merged(PLAIN, {"ddl": {"hosts": 3, "ranksPerHost": 2, "options": ["-m", "r"]}}))
    assert set(rendered) == {
        "Service/job-bascule-RUN",
        "ConfigMap/job-bascule-RUN-hosts",
        "Job/job-bascule-RUN",
        "Pod/job-bascule-test",
    }
    job, service = rendered["Job/job-bascule-RUN"], rendered["Service/job-bascule-RUN"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert rendered["ConfigMap/job-bascule-RUN-hosts"]["data"]["hostfile"].splitlines() == [
        # The names that Kubernetes gives the pods of such a job.
        f"{job['metadata']['name']}-{number}.{service['metadata']['name']} slots=2"
        for number in range(3)
    ]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    pods = pod_templates(rendered)
    selector = service["spec"]["selector"].items()
    assert [name for name, pod in pods.items() if selector <= pod["metadata"]["labels"].items()] == ["worker"]
    assert args(pods["worker"]) == ["job", "ddlrun", "-m", "r", "--", "python", "train.py"]
    assert args(pods["test"]) == ["launch", "ddlrun", "doctor"]


def test_hosts_end_with_the_first_and_leave_nothing_reserved(helm: Helm) -> None:
    spec = helm.render(PLAIN)["Job/job-bascule-RUN"]["spec"]
    # Host 0 has launched the program. When it succeeds Kubernetes ends the others, and when it fails, too.
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"  # with retries two hosts would have one name for a while
    policy = helm.render(MPIJOB)["MPIJob/job-bascule-RUN"]["spec"]["runPolicy"]
    assert policy == {"cleanPodPolicy": "Running", "backoffLimit": 0}


def test_the_hosts_of_a_job_on_gpus_follow_from_their_number(helm: Helm) -> None:
    values = {**PLAIN, "gpus": 8, "ddl": {"enabled": True, "gpusPerHost": 4, "sshKeySecret": "keys"}}
    rendered = helm.render(values)
    assert rendered["Job/job-bascule-RUN"]["spec"]["completions"] == 2
    assert rendered["ConfigMap/job-bascule-RUN-hosts"]["data"]["hostfile"].count("slots=4") == 2
    for kind in ("limits", "requests"):
        assert resources(pod_templates(rendered)["worker"])[kind]["nvidia.com/gpu"] == 4
        assert "nvidia.com/gpu" not in resources(pod_templates(rendered)["test"])[kind]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_shared_cluster_needs_reaches_every_pod_of_the_job(helm: Helm, mode: str) -> None:
    rendered = helm.render(combined(mode, ("all the rest",)))
    (job,) = (one for one in rendered.values() if one["kind"] in ("Job", "MPIJob"))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mri"
    policy = job["spec"].get("runPolicy", job["spec"])
    assert policy["backoffLimit"] == 2
    assert policy["activeDeadlineSeconds"] == 86400
    assert policy["ttlSecondsAfterFinished"] == 0
    pods = pod_templates(rendered)
    test = pods.pop("test")
    assert not [one for one in test["spec"]["volumes"] if one["name"] == "models"]
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["runtimeClassName"] == "nvidia"
        assert spec["priorityClassName"] == "batch"
        assert spec["schedulerName"] == "volcano"
        assert spec["serviceAccountName"] == "trainer"
        assert {"name": "models", "configMap": {"name": "models"}} in spec["volumes"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container(pod)["volumeMounts"]
        (constraint,) = spec["topologySpreadConstraints"]
        assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_a_spread_keeps_the_selector_that_it_has(helm: Helm) -> None:
    own = {"matchLabels": {"team": "mri"}}
    constraint = {**OPTIONS["all the rest"]["topologySpreadConstraints"][0], "labelSelector": own}
    pod = pod_templates(helm.render({**ONE_POD, "topologySpreadConstraints": [constraint]}))["trainer"]
    # helm merges maps, so that the chart's own labels would be added to these.
    assert pod["spec"]["topologySpreadConstraints"] == [constraint]


def test_a_limit_of_cores_can_be_left_out(helm: Helm) -> None:
    given = {"resources": {"limits": {"cpu": None}, "requests": {"cpu": "4"}}}
    for mode in MODES.values():
        rendered = helm.render(merged(mode, given))
        validate(rendered)
        pods = pod_templates(rendered)
        hosts = [pods[name] for name in ("trainer", "worker") if name in pods]
        assert [resources(pod) for pod in hosts] == [{"limits": {"memory": "16Gi"}, "requests": {"cpu": "4"}}]


def test_mpijob_leaves_hosts_and_keys_to_the_operator(helm: Helm) -> None:
    rendered = helm.render({**MPIJOB, "gpus": 8, "ddl": {"enabled": True, "gpusPerHost": 4}})
    assert set(rendered) == {"MPIJob/job-bascule-RUN", "Pod/job-bascule-test"}
    spec = rendered["MPIJob/job-bascule-RUN"]["spec"]
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
    hosts = [name for name in ("worker", "launcher") if name in pods]
    assert len(hosts) == (1 if values is PLAIN else 2)
    for name in hosts:
        assert {"name": "BASCULE_SSH_PORT", "value": "2022"} in container(pods[name])["env"]
        assert pods[name]["spec"]["hostNetwork"] is True
        assert pods[name]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
        # Else Open MPI starts the ranks of a host on the launcher's node in the launcher (test_hosts.py shows it).
        assert {"name": "PRTE_MCA_prte_do_not_resolve", "value": "true"} in container(pods[name])["env"]
    # Declared, so that no two hosts are put on one node, where they would want the same port.
    assert container(pods["worker"])["ports"] == [{"name": "ssh", "containerPort": 2022}]


@pytest.mark.parametrize("values", [PLAIN, MPIJOB], ids=["plain", "mpijob"])
def test_variables_reach_the_ranks_which_get_none_of_their_pods(helm: Helm, values: Object) -> None:
    given = [*OPTIONS["all the rest"]["env"], {"name": "DDL_OPTIONS", "value": "-v"}]
    pods = pod_templates(helm.render(merged(values, {"env": given, "ddl": {"options": ["-v"]}})))
    words = ["ddlrun", "-x", "EPOCHS", "-x", "TOKEN", "-v", "--", "python", "train.py"]
    # By their names, as a value may be a secret; DDL's own not, which ddlrun passes on with what its options add.
    launcher = pods["worker" if values is PLAIN else "launcher"]
    assert args(launcher)[1:] == words
    assert all(one in container(launcher)["env"] for one in given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_pod_that_asks_for_no_gpu_sees_none_whatever_its_image_asks_for(helm: Helm, mode: str, gpus: int) -> None:
    values = merged(MODES[mode], {"gpus": gpus})
    for name, template in pod_templates(helm.render(values)).items():
        taken = "nvidia.com/gpu" in resources(template)["limits"]
        assert taken == (gpus > 0 and name in ("trainer", "worker")), name
        hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container(template).get("env", [])
        assert hidden != taken, name


@pytest.mark.parametrize("mode", MODES)
def test_a_pod_that_asks_for_a_part_of_a_gpu_sees_it(helm: Helm, mode: str) -> None:
    part = {"nvidia.com/mig-1g.10gb": 1}
    for name, template in pod_templates(helm.render(merged(MODES[mode], {"resources": {"limits": part}}))).items():
        taken = part.items() <= resources(template)["limits"].items()
        assert taken == (name in ("trainer", "worker"))
        hidden = "NVIDIA_VISIBLE_DEVICES" in [one["name"] for one in container(template).get("env", [])]
        assert hidden != taken, name


def test_the_probe_of_a_host_does_not_connect_which_sshd_would_log_as_an_error(helm: Helm) -> None:
    assert list(container(pod_templates(helm.render(PLAIN))["worker"])["readinessProbe"]) == ["exec", "periodSeconds"]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_values_make_the_same_objects_and_others_make_others_but_for_the_volume(helm: Helm, mode: str) -> None:
    values = merged(MODES[mode], {"data": {"size": "10Gi"}})
    printed = [
        helm.template(one, *arguments).stdout
        for one, arguments in (
            (values, ()),
            (values, ("--is-upgrade",)),  # as Argo CD and kustomize render again and again
            (merged(values, {"env": [{"name": "EPOCHS", "value": "3"}]}), ("--is-upgrade",)),
        )
    ]
    first, again, other = ({f"{one['kind']}/{one['metadata']['name']}": one for one in helm.parse(a)} for a in printed)
    assert first == again
    assert set(first) & set(other) == {"PersistentVolumeClaim/job-bascule-data", "Pod/job-bascule-test"}
    assert run_of(printed[0]) not in printed[2]  # nothing of the new run selects, names or mounts what is old


@pytest.mark.parametrize(
    ("values", "mode"),
    [(ONE_POD, "ReadWriteOnce"), (PLAIN, "ReadWriteMany"), (merged(PLAIN, {"ddl": {"hosts": 1}}), "ReadWriteMany")],
    ids=["one pod", "two hosts", "a host and the launcher"],
)
def test_a_new_volume_can_be_mounted_by_all_pods_of_the_job_and_outlives_the_release(
    helm: Helm, values: Object, mode: str
) -> None:
    rendered = helm.render(merged(values, {"data": {"size": "10Gi"}}))
    claim = rendered["PersistentVolumeClaim/job-bascule-data"]
    assert claim["spec"]["accessModes"] == [mode]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    pods = pod_templates(rendered)
    test = pods.pop("test")  # it would hang where the volume can be mounted only by the job
    assert not [one for one in test["spec"]["volumes"] if one["name"] == "data"]
    assert container(test)["workingDir"] == "/home/bascule"
    for template in pods.values():
        (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "data")
        assert volume["persistentVolumeClaim"]["claimName"] == "job-bascule-data"
        assert container(template)["workingDir"] == "/data"


def test_the_longest_release_name_leaves_every_name_within_its_bound(helm: Helm) -> None:
    for values in (PLAIN, MPIJOB):
        rendered = helm.render(values, release="r" * 53)
        validate(rendered)
        names = [name.partition("/")[2].replace("RUN", "01234567") for name in rendered]
        assert max(map(len, names)) + len("-4294967296") <= 63


def test_two_releases_with_long_names_share_no_name(helm: Helm) -> None:
    one, other = (helm.render(PLAIN, release="r" * 52 + end) for end in "ab")
    assert not set(one) & set(other)


def test_the_notes_say_how_to_follow_to_end_and_to_test(helm: Helm) -> None:
    for values, words in (
        (ONE_POD, ("logs -f job/job-bascule-RUN", "helm -n default test job", "helm upgrade", "describe pod")),
        (merged(PLAIN, {"data": {"size": "1Gi"}}), ("job-name=job-bascule-RUN,batch", "index=0", "delete pvc")),
        (merged(PLAIN, {"ddl": {"waitSeconds": 900}}), ("--timeout 1200s",)),  # helm's own is shorter than the wait
        (MPIJOB, ("get mpijob job-bascule-RUN",)),
    ):
        notes = helm.notes(values)
        assert "kubectl -n default get events" in notes
        assert "delete pod job-bascule-test" in notes  # helm leaves a test's pod when it uninstalls
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
