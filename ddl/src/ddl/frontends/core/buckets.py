"""Buckets: which gradients travel together. Pure: from sizes to lists of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

DEFAULT_BYTES = 25 << 20  # as in DistributedDataParallel: large enough to be fast, small enough to begin early


def limit_of(environment: Mapping[str, str]) -> int:
    """The most bytes of a bucket: HOROVOD_FUSION_THRESHOLD if set; 0: one gradient a bucket. Raises ValueError."""
    text = environment.get("HOROVOD_FUSION_THRESHOLD", "")
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise ValueError(f"HOROVOD_FUSION_THRESHOLD is {text!r}: it must be a number of bytes")
    return int(text)


def plan(
    nbytes: Sequence[int], kinds: Sequence[Hashable], limit: int, groups: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Divide the numbers of parameters into buckets, in the order in which their gradients are likely to be ready.

    The last parameters' come first. A bucket holds one kind (a type), and at most `limit` bytes or one parameter;
    `groups` are buckets of any size, divided by kind.
    """
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    buckets: list[list[int]] = []
    open_ones: dict[Hashable, list[int]] = {}
    for number in reversed(range(len(nbytes))):
        group = group_of.get(number)
        key = (group, kinds[number])
        bucket = open_ones.get(key)
        is_full = bucket is not None and group is None and sum(nbytes[it] for it in bucket) + nbytes[number] > limit
        if bucket is None or is_full:
            bucket = open_ones[key] = []
            buckets.append(bucket)
        bucket.append(number)
    # A bucket can be sent when its last gradient is ready.
    return sorted(buckets, key=lambda bucket: -min(bucket))


def even_groups(count: int, parts: int) -> list[list[int]]:
    """`count` numbers in `parts` consecutive groups of almost the same length; no groups if `parts` is 0."""
    bounds = [count * part // parts for part in range(parts + 1)] if parts else []
    return [list(range(first, last)) for first, last in itertools.pairwise(bounds) if first < last]
