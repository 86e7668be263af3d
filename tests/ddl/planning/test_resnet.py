import pytest

from ddl.planning import resnet


def test_resnet_50_has_its_published_parameters_and_work() -> None:
    found = resnet.resnet50()
    assert sum(one.elements for one in found) == 25_557_032  # torchvision's documentation of resnet50
    assert sum(one.work for one in found) == pytest.approx(4.09e9, rel=0.005)  # its GFLOPS, of multiply-adds
    assert len(found) == 161
    assert len({one.name for one in found}) == len(found)


def test_buckets_are_those_that_pytorch_makes() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    found = resnet.resnet50()
    tensors = [torch.empty(one.elements, device="meta") for one in reversed(found)]
    limits = [resnet.FIRST_BUCKET, resnet.BUCKET]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    expected = [sum(4 * tensors[at].numel() for at in bucket) for bucket in indices]
    assert [one.nbytes for one in resnet.buckets(found)] == expected


def test_buckets_become_ready_in_order_and_hold_every_gradient_once() -> None:
    found = resnet.buckets(resnet.resnet50())
    assert sum(one.nbytes for one in found) == 4 * 25_557_032
    ready = [one.ready for one in found]
    assert ready == sorted(ready)
    assert 0 < ready[0] < 0.05
    assert ready[-1] == 1.0
