"""examples/recipes/kueue.yaml: a Job that Kueue takes."""

from charts import ROOT, validate


def test_kueues_job_passes_kubernetes_schemas_and_waits_for_its_queue(tools: object) -> None:
    import yaml

    job = yaml.safe_load((ROOT / "examples/recipes/kueue.yaml").read_text())
    validate({"job": job})
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["suspend"] is True
    assert int(job["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"]) < job["spec"]["parallelism"]
