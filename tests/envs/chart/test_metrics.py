"""Who serves a training's figures, at which address, and what scrapes them."""

import pytest

from charts import MPIJOB, ONE_POD, PLAIN, Helm, merged, pod_templates, validate

METRICS = {"metrics": {"port": 9117, "serviceMonitor": True, "labels": {"release": "prometheus"}}}
MODES = {"one pod": ONE_POD, "plain": PLAIN, "mpijob": MPIJOB}


def test_the_one_pod_serves_them_at_its_own_address(helm: Helm) -> None:
    rendered = helm.render(merged(ONE_POD, METRICS))
    validate(rendered)
    (container,) = pod_templates(rendered)["trainer"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables["LMS_METRICS_PORT"]["value"] == "9117"
    assert variables["LMS_METRICS_ADDRESS"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {"name": "metrics", "containerPort": 9117} in container["ports"]


@pytest.mark.parametrize("mode", ["plain", "mpijob"])
def test_hosts_of_ddl_get_theirs_from_ddlrun(helm: Helm, mode: str) -> None:
    rendered = helm.render(merged(MODES[mode], METRICS))
    validate(rendered)
    pods = pod_templates(rendered)
    (launches,) = pods["worker" if mode == "plain" else "launcher"]["spec"]["containers"]
    words = " ".join(launches["args"])
    assert "ddlrun --metrics-port 9117 --metrics-address 0.0.0.0 -- python train.py" in words
    (worker,) = pods["worker"]["spec"]["containers"]
    assert {"name": "metrics", "containerPort": 9117} in worker["ports"]


@pytest.mark.parametrize("mode", MODES)
def test_the_service_monitor_finds_the_pods_that_serve(helm: Helm, mode: str) -> None:
    rendered = helm.render(merged(MODES[mode], METRICS))
    service = rendered["Service/job-bascule-RUN-metrics"]
    monitor = rendered["ServiceMonitor/job-bascule-RUN-metrics"]
    pods = pod_templates(rendered)
    found = [
        name
        for name, pod in pods.items()
        if service["spec"]["selector"].items() <= pod["metadata"].get("labels", {}).items()
    ]
    assert found == ["trainer" if mode == "one pod" else "worker"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    others = [one for name, one in rendered.items() if name.startswith("Service/") and one is not service]
    for other in others:  # the hosts' own Service has no such port
        assert not monitor["spec"]["selector"]["matchLabels"].items() <= other["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize("mode", MODES)
def test_by_default_no_port_is_open(helm: Helm, mode: str) -> None:
    rendered = helm.render(MODES[mode])
    assert "metrics" not in str(rendered).lower()
