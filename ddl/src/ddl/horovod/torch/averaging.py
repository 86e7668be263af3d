"""Reduces the gradients of a set of parameters over all ranks while the backward pass goes on.

Buckets start in one fixed order, however autograd orders its work: a bucket waits for those before it. When a bucket
starts differs from rank to rank, so buckets have names: the script's calls between backward() and step() do not stand
in their order.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddl.errors import DDLError, StateError
from ddl.frontends.core.announcements import Announcement
from ddl.frontends.core.buckets import plan
from ddl.frontends.core.handle import Handle
from ddl.frontends.core.negotiation import Negotiator
from ddl.horovod.torch import sparse, starting
from ddl.horovod.torch.compression import Compressor
from ddl.horovod.torch.starting import Reduction


class Averager:
    """Reduces gradients as `how` says. `passes` backward passes make a gradient; a bucket has at most `limit` bytes.

    Making one is collective over the process set. On a rank that is not in the set it does nothing: such a rank keeps
    its own gradients.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        how: Reduction,
        compression: type[Compressor],
        sparse_as_dense: bool,
        passes: int,
        limit: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.passes = passes
        self._how = how
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._limit = limit
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Parameter, _Bucket] = {}
        self.names: dict[Parameter, str] = {}  #: of the parameters that were added
        self._started = 0  # buckets in flight: the first ones
        self.synchronized = False  #: no gradient has come since the last `synchronize`
        self.skips = False  #: the next step takes the gradients as they are
        self._negotiator: Negotiator | None = None  # of a rank that is in the set
        if how.process_set.included():
            self._negotiator = how.process_set.negotiator
            how.process_set.meet("DistributedOptimizer")
            self._number = how.process_set.count_optimizer()
        self.add(named, groups)

    def add(self, named: Sequence[tuple[str, Parameter]], groups: Sequence[Sequence[int]] = ()) -> None:
        """Reduce these parameters' gradients, too. Every rank adds the same."""
        if not named or self._negotiator is None:
            return
        self.names.update((parameter, name) for name, parameter in named)
        # An optimizer that is forgotten, with this, leaves its parameters to the next one.
        reference = weakref.WeakMethod(self._accumulated)

        def accumulated(parameter: Tensor) -> None:
            method = reference()
            if method is not None:
                method(parameter)

        parameters = [parameter for _, parameter in named]
        nbytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        for numbers in plan(nbytes, kinds, self._limit, groups):
            name = f"gradients of optimizer {self._number}, bucket {len(self._buckets)}"
            bucket = _Bucket(name, self.names, [parameters[number] for number in numbers])
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(accumulated)

    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way."""
        return self._started > 0

    def _accumulated(self, parameter: Tensor) -> None:
        assert isinstance(parameter, Parameter)
        bucket = self._bucket_of[parameter]
        self.synchronized = False
        bucket.counts[parameter] = count = bucket.counts.get(parameter, 0) + 1
        if count > self.passes or bucket.handle is not None:
            raise RuntimeError(
                f"{self.names[parameter]} got a gradient in {count} backward passes without step() or "
                f"synchronize(), but backward_passes_per_step is {self.passes}: raise that to add up more of them"
            )
        while self._started < len(self._buckets) and self._buckets[self._started].is_ready(self.passes):
            self._start_next()

    def _start_next(self) -> None:
        self._need_its_job()
        bucket = self._buckets[self._started]
        bucket.begin(self._sparse_as_dense)
        small, bucket.context = self._compression.compress(bucket.gather())
        handle = starting.reduce_in_place(
            [small], self._how, bucket.name, bucket.terms, bucket.made_dense, bucket.on_announced
        )
        bucket.handle = handle.in_background()
        self._started += 1

    def _need_its_job(self) -> None:
        process_set = self._how.process_set
        if process_set.negotiator is not self._negotiator:  # raises if the set is not in use
            raise StateError(
                f"rank {process_set.rank()} of {process_set}: the optimizer is from before shutdown() or "
                "remove_process_set(): make another with DistributedOptimizer"
            )

    def synchronize(self) -> None:
        """Start the rest, with zeros for missing gradients; wait, and put the results into the gradients.

        Raises the error that ended a bucket's call, when all are over.
        """
        try:
            while self._started < len(self._buckets):
                self._start_next()
            self._finish()
        finally:
            for bucket in self._buckets:
                bucket.reset()
            self._started = 0
        self.synchronized = True

    def _finish(self) -> None:
        errors = []
        for bucket in self._buckets:
            assert bucket.handle is not None
            try:
                results = bucket.handle.wait()[0]
            except DDLError as error:  # its name is free again, and so must the others' be
                errors.append(error)
            else:
                bucket.scatter(self._compression.decompress(results, bucket.context))
        if errors:
            raise errors[0]
        # Not while the backward pass goes on: they have to be summed by index first.
        for bucket in self._buckets:
            for number, parameter in enumerate(bucket.sparse_parameters):
                name = f"{bucket.name}, sparse gradient {number}"
                parameter.grad = sparse.reduce(bucket.sparse_gradient(parameter), self._how, name).wait()
        for bucket in self._buckets:
            bucket.restore_sparse()


class _Bucket:
    """Parameters whose gradients travel as one tensor."""

    def __init__(self, name: str, names: Mapping[Parameter, str], parameters: list[Parameter]) -> None:
        self.name = name
        self.names = names
        self.parameters = parameters
        self.handle: Handle[list[Tensor]] | None = None
        self.context: object = None
        self.counts: dict[Parameter, int] = {}  # backward passes since the last reset
        self.sparse: dict[Parameter, int] = {}  # whose gradients are, once one was seen; how many dimensions are
        self._dense_here: dict[Parameter, int] = {}  # made so in this step; how many dimensions were sparse
        self._dense_anywhere: dict[Parameter, int] = {}  # on some rank

    def is_ready(self, passes: int) -> bool:
        return all(self.counts.get(parameter, 0) >= passes for parameter in self.parameters)

    def begin(self, sparse_as_dense: bool) -> None:
        """Find the sparse gradients, and make them dense if that is wanted."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout == torch.strided:
                continue
            if sparse_as_dense:
                self._dense_here[parameter] = gradient.sparse_dim()
                parameter.grad = sparse.dense(gradient)
            else:
                self.sparse.setdefault(parameter, gradient.sparse_dim())

    @property
    def made_dense(self) -> tuple[int, ...]:
        """For each gradient, its number of sparse dimensions: ranks without a gradient need to know it."""
        return tuple(self._dense_here.get(parameter, 0) for parameter in self.parameters) if self._dense_here else ()

    def on_announced(self, announced: Mapping[int, Announcement]) -> None:
        """Note what every rank has `made_dense`."""
        for its in announced.values():
            for parameter, dimensions in zip(self.parameters, its.per_rank, strict=False):
                if dimensions:
                    self._dense_anywhere[parameter] = dimensions

    def restore_sparse(self) -> None:
        """Give back what was made dense as it came: an optimizer for sparse gradients takes no others."""
        for parameter, dimensions in self._dense_anywhere.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(dimensions)

    @property
    def terms(self) -> str:
        """Names the sparse parameters, which must be the same on every rank."""
        names = [self.names[parameter] for parameter in self.sparse_parameters]
        return f"sparse gradients, without sparse_as_dense=True, of {', '.join(names)}" if names else ""

    @property
    def sparse_parameters(self) -> list[Parameter]:
        """Those with sparse gradients, in the same order on every rank."""
        return [parameter for parameter in self.parameters if parameter in self.sparse]

    @property
    def _dense(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter not in self.sparse]

    def gather(self) -> Tensor:
        """The dense gradients, one after the other, in memory of their own."""
        # Another rank may have a gradient that this one has not.
        parts = [torch.zeros_like(its) if its.grad is None else its.grad.detach() for its in self._dense]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else self.parameters[0].new_empty(0)

    def scatter(self, results: Tensor) -> None:
        """Put the results, in the order of `gather`, into the gradients."""
        parts = results.split([parameter.numel() for parameter in self._dense])
        for parameter, part in zip(self._dense, parts, strict=True):
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.copy_(part.view(parameter.shape))
            elif parameter.requires_grad:  # one that was frozen meanwhile stays without
                parameter.grad = part.view(parameter.shape).clone()

    def sparse_gradient(self, parameter: Parameter) -> Tensor:
        """The gradient of a parameter in `sparse`: one without elements if this rank has none."""
        if parameter.grad is not None:
            return parameter.grad
        dimensions = self.sparse[parameter]
        indices = torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[dimensions:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)

    def reset(self) -> None:
        self.handle = None
        self.context = None
        self.counts.clear()
        self._dense_here.clear()
        self._dense_anywhere.clear()
