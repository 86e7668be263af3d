"""What the chart makes of bad values: an error that names the value, and nothing else."""

import pytest

from charts import MPIJOB, ONE_POD, PLAIN, Helm, Object, merged, validate

ON_GPUS = merged(PLAIN, {"gpus": 8, "ddl": {"hosts": 0, "gpusPerHost": 4}})

# Found by the schema: the value, and what its error names.
MALFORMED = {
    "a misspelt option": ({"gpu": 2}, "gpu"),
    "a misspelt option of ddl": ({"ddl": {"gpuPerHost": 2}}, "gpuPerHost"),
    "a number of GPUs in words": ({"gpus": "two"}, "gpus"),
    "half a GPU": ({"gpus": 0.5}, "gpus"),
    "less than no GPU": ({"gpus": -1}, "gpus"),
    "no GPU a host": ({"ddl": {"gpusPerHost": 0}}, "gpusPerHost"),
    "an unknown mode": ({"mode": "operator"}, "mode"),
    "DDL by a word": ({"ddl": {"enabled": "yes"}}, "enabled"),
    "a port that needs privileges": ({"ddl": {"sshPort": 22}}, "sshPort"),
    "a port that cannot be": ({"ddl": {"sshPort": 70000}}, "sshPort"),
    "a key in place of its secret's name": ({"ddl": {"sshKeySecret": "-----BEGIN KEY"}}, "sshKeySecret"),
    "the end of ddlrun's options": ({"ddl": {"options": ["-v", "--"]}}, "options"),
    "a command in one string": ({"command": "python train.py"}, "command"),
    "a number among the words of the command": ({"command": ["sleep", 3]}, "command"),
    "a variable without a name": ({"env": [{"value": "1"}]}, "env"),
    "a variable with two values": ({"env": [{"name": "A", "value": "1", "valueFrom": {}}]}, "env"),
    "an image with its tag in its name": ({"image": {"repository": "registry.example/a:b/c:1"}}, "repository"),
    "a tag that is a number": ({"image": {"tag": 1.0}}, "tag"),
    "a digest without its kind": ({"image": {"digest": "0123456789abcdef" * 4}}, "digest"),
    "a digest that is cut": ({"image": {"digest": "sha256:0123"}}, "digest"),
    "a size without a number": ({"data": {"size": "Gi"}}, "size"),
    "an unknown access mode": ({"data": {"size": "1Gi", "accessMode": "ReadWrite"}}, "accessMode"),
    "a relative mount path": ({"data": {"mountPath": "data"}}, "mountPath"),
    "a mount path over the environment": ({"data": {"mountPath": "/opt/conda"}}, "mountPath"),
    "resources without limits": ({"resources": None}, "resources"),
    "limits without memory": ({"resources": {"limits": {"memory": None}}}, "memory"),
    "memory in words": ({"resources": {"limits": {"memory": "16 GB"}}}, "memory"),
    "a label that is a number": ({"podLabels": {"team": 1}}, "podLabels"),
    "a queue that is a number": ({"jobLabels": {"kueue.x-k8s.io/queue-name": 1}}, "jobLabels"),
    "a port for metrics that needs privileges": ({"metrics": {"port": 80}}, "port"),
    "a port for metrics that cannot be": ({"metrics": {"port": 65536}}, "port"),
    "a scrape now and then": ({"metrics": {"interval": "often"}}, "interval"),
    "half a retry": ({"retries": 0.5}, "retries"),
    "no time at all": ({"deadlineSeconds": 0}, "deadlineSeconds"),
    "a time in words": ({"ttlSecondsAfterFinished": "1h"}, "ttlSecondsAfterFinished"),
    "a class that is no name": ({"runtimeClassName": "No Name"}, "runtimeClassName"),
    "a volume without a name": ({"volumes": [{"emptyDir": {}}]}, "volumes"),
    "a relative path of a volume": ({"volumeMounts": [{"name": "a", "mountPath": "a"}]}, "volumeMounts"),
    "a spread over nothing": ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologySpreadConstraints"),
}

# Right each, and wrong together or missing: the values, and what the error says was asked, found and to be done.
CONTRADICTING: dict[str, tuple[Object, tuple[str, ...]]] = {
    "no image": ({"command": ["true"]}, ("image.repository is empty", "make image")),
    "no tag": (merged(ONE_POD, {"image": {"tag": ""}}), ("image.tag is empty", "digest")),
    "no command": (merged(ONE_POD, {"command": []}), ("command is empty", "--set")),
    "no secret": (
        merged(PLAIN, {"ddl": {"sshKeySecret": ""}}),
        ("ddl.sshKeySecret is empty", "ssh-keygen", "kubectl create secret"),
    ),
    "a secret for the operator": (merged(MPIJOB, {"ddl": {"sshKeySecret": "keys"}}), ('"keys"', "leave it empty")),
    "no number of hosts": (merged(PLAIN, {"ddl": {"hosts": 0}}), ("neither gpus nor ddl.hosts",)),
    "GPUs that do not divide": (merged(ON_GPUS, {"gpus": 6}), ("gpus is 6", "ddl.gpusPerHost is 4")),
    "hosts that GPUs deny": (merged(ON_GPUS, {"ddl": {"hosts": 3}}), ("ddl.hosts is 3", "makes 2")),
    "ranks that share a GPU": (merged(ON_GPUS, {"ddl": {"ranksPerHost": 2}}), ("ddl.ranksPerHost is 2",)),
    "two volumes": (merged(ONE_POD, {"data": {"claim": "a", "size": "1Gi"}}), ('data.claim is "a"', '"1Gi"')),
    "a class of no volume": (merged(ONE_POD, {"data": {"storageClass": "fast"}}), ("data.size is empty",)),
    "a variable of the chart's own": (
        merged(ONE_POD, {"env": [{"name": "BASCULE_SSH_PORT", "value": "1"}]}),
        ("BASCULE_SSH_PORT", "ddl.sshPort"),
    ),
    "a variable that the chart sets": (
        merged(ONE_POD, {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}),
        ("NVIDIA_VISIBLE_DEVICES", "by gpus", "leave it out"),
    ),
    "a variable given twice": (
        merged(ONE_POD, {"env": [{"name": "EPOCHS", "value": value} for value in "13"]}),
        ("env names EPOCHS twice",),
    ),
    "a label of the chart's own": (
        merged(ONE_POD, {"podLabels": {"app.kubernetes.io/name": "x"}}),
        ("podLabels names app.kubernetes.io/name",),
    ),
    "the same on the job": (
        merged(ONE_POD, {"jobLabels": {"bascule.run": "x"}}),
        ("jobLabels names bascule.run",),
    ),
    "a volume of the chart's own": (
        merged(ONE_POD, {"volumes": [{"name": "scratch", "emptyDir": {}}]}),
        ("volumes names scratch", "choose another name"),
    ),
    "a path of the chart's own": (
        merged(ONE_POD, {"volumeMounts": [{"name": "models", "mountPath": "/tmp/"}]}),
        ("volumeMounts names /tmp/", "choose another path"),
    ),
    "nothing to scrape": (
        merged(ONE_POD, {"metrics": {"serviceMonitor": True}}),
        ("metrics.serviceMonitor is true and metrics.port is 0", "give metrics.port"),
    ),
    "metrics on the nodes' network": (
        merged(PLAIN, {"ddl": {"hostNetwork": True}, "metrics": {"port": 9117}}),
        ("metrics.port is 9117 and ddl.hostNetwork is true", "choose one"),
    ),
    "one port for two": (
        merged(PLAIN, {"metrics": {"port": 2222}}),
        ("metrics.port and ddl.sshPort are both 2222",),
    ),
    "a variable of the metrics": (
        merged(ONE_POD, {"metrics": {"port": 9117}, "env": [{"name": "LMS_METRICS_PORT", "value": "1"}]}),
        ("LMS_METRICS_PORT",),
    ),
    "a GPU among the limits": (
        merged(ONE_POD, {"resources": {"limits": {"nvidia.com/gpu": 1}}}),
        ("resources.limits names nvidia.com/gpu", "ddl.gpusPerHost"),
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_value_is_rejected_by_its_name(helm: Helm, what: str) -> None:
    values, name = MALFORMED[what]
    done = helm.template(merged(ONE_POD, values))
    assert done.returncode != 0
    assert done.stdout == ""
    assert "values don't meet the specifications of the schema" in done.stderr
    assert name in done.stderr


@pytest.mark.parametrize("what", CONTRADICTING)
def test_values_that_contradict_each_other_are_rejected_with_what_to_do(helm: Helm, what: str) -> None:
    values, words = CONTRADICTING[what]
    done = helm.template(values)
    assert done.returncode != 0
    assert done.stdout == ""
    assert all(word in done.stderr for word in words), done.stderr
    assert "schema" not in done.stderr


@pytest.mark.parametrize("release", ["2nd", "one.two", "2024", f"{'a' * 26}.{'b' * 15}"])
def test_a_release_whose_hosts_could_not_be_named_after_it_is_rejected(helm: Helm, release: str) -> None:
    validate(helm.render(ONE_POD, release=release))  # one pod can, also where the name is cut at its dot
    for values in (PLAIN, MPIJOB):
        done = helm.template(values, release=release)
        assert done.returncode != 0
        assert f'the release is called "{release}"' in done.stderr


@pytest.mark.parametrize("name", ["true", "456"])
def test_a_name_that_yaml_takes_for_something_else_stays_a_name(helm: Helm, name: str) -> None:
    release = name if name == "true" else "job"
    named = {"image": {"pullSecrets": [name]}, "ddl": {"sshKeySecret": name}, "data": {"claim": name}}
    validate(helm.render(merged(PLAIN, named), release))
    validate(helm.render(merged(ONE_POD, {"data": {"size": "1Gi", "storageClass": name}}), release))


def test_a_cluster_that_is_too_old_is_refused(helm: Helm) -> None:
    done = helm.template(ONE_POD, "--kube-version", "1.20.0")
    assert done.returncode != 0
    assert ">=1.31.0" in done.stderr
