"""What the chart's pods may do: Kubernetes' standard "restricted" for pods, and a little more."""

import pytest

from charts import MPIJOB, ONE_POD, PLAIN, Helm, Object, merged, pod_templates

# The volumes that the standard allows.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
MODES = {"one pod": ONE_POD, "plain": PLAIN, "mpijob": MPIJOB}


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_meets_the_standard_restricted(helm: Helm, mode: str) -> None:
    pods = pod_templates(helm.render(merged(MODES[mode], {"data": {"claim": "scans"}})))
    assert len(pods) >= 2
    for name, pod in pods.items():
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec), name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in container["securityContext"]
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= VOLUMES, volume


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_writes_only_to_its_volumes_and_takes_only_what_is_allowed(helm: Helm, mode: str) -> None:
    for pod in pod_templates(helm.render(MODES[mode])).values():
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert pod["spec"]["automountServiceAccountToken"] is False
        for volume in pod["spec"]["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", "/home/bascule", "/run/bascule", "/dev/shm"} <= written


def test_a_key_is_mounted_by_its_secrets_name_and_never_part_of_the_chart(helm: Helm) -> None:
    rendered = helm.render(PLAIN)
    assert not [name for name in rendered if name.startswith("Secret/")]
    for name, pod in pod_templates(rendered).items():
        (volume,) = (one for one in pod["spec"]["volumes"] if "secret" in one)
        assert volume["secret"] == {"secretName": "keys", "defaultMode": 0o440}
        (mount,) = (one for one in container_mounts(pod) if one["name"] == volume["name"])
        assert mount["readOnly"] is True, name


def test_a_pod_that_logs_in_nowhere_gets_no_key(helm: Helm) -> None:
    values = merged(PLAIN, {"ddl": {"enabled": False}})
    for pod in pod_templates(helm.render(values)).values():
        assert not [one for one in pod["spec"]["volumes"] if "secret" in one]


def container_mounts(pod: Object) -> list[Object]:
    (container,) = pod["spec"]["containers"]
    mounts: list[Object] = container["volumeMounts"]
    return mounts
