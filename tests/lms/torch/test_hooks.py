"""Where PyTorch allows no saved-tensor hooks, LMS's step aside; everywhere else they stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.autograd import graph
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.optim import optimizer

from lms.torch.session import Session

Make = Callable[..., Session]
Step = Callable[[int], Iterable[Tensor]]


def loss(x: Tensor) -> Tensor:
    return (torch.tanh(x) * x.exp()).sum()


def backward_of_vjp(x: Tensor) -> Tensor:
    _, pull = vjp(loss, x)
    return pull(torch.ones(()))[0]


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": grad(loss),
    "grad_and_value": lambda x: grad_and_value(loss)(x)[0],
    "grad of grad": grad(lambda x: grad(loss)(x).square().sum()),
    "vmap of grad": vmap(grad(loss)),
    "vjp": backward_of_vjp,
    "jvp": lambda x: jvp(loss, (x,), (x,))[1],
    "jacrev": jacrev(lambda x: x.tanh() * x),
    "jacfwd": jacfwd(lambda x: x.tanh() * x),
    "hessian": hessian(loss),
    "linearize": lambda x: linearize(loss, x)[1](x),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_function_transforms_run_in_a_training(
    kind: str, same_as_plain: Callable[..., list], models: ModuleType
) -> None:
    def build() -> Step:
        model = models.mlp()
        step = models.trained(model, lambda _: model(torch.randn(16, 8)).square().mean())

        def both(index: int) -> list[Tensor]:
            shown = [TRANSFORMS[kind](torch.randn(3, 4))]
            kept = torch.tanh(torch.randn(4, 4, requires_grad=True))  # live across the transform
            shown.append(TRANSFORMS[kind](kept.detach()))
            return [*shown, *torch.autograd.grad(kept.square().sum(), kept), *step(index)]

        return both

    same_as_plain(build)


def test_a_training_through_a_gradient_is_that_of_plain(same_as_plain: Callable[..., list], models: ModuleType) -> None:
    """As in meta-learning: the outer backward goes through what an inner `grad` computed."""

    def build() -> Step:
        model = models.mlp()

        def outer(_: int) -> Tensor:
            parameters, x = dict(model.named_parameters()), torch.randn(16, 8)
            slopes = grad(lambda p: functional_call(model, p, (x,)).square().mean())(parameters)
            moved = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
            return functional_call(model, moved, (x,)).square().mean()

        return models.trained(model, outer)

    same_as_plain(build)


def test_under_other_hooks_a_transform_is_refused_as_without_a_session_and_all_hooks_stay(lms: Make) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with lms() as session:
        with graph.save_on_cpu():
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                grad(loss)(torch.randn(3))
            x.exp().sum().backward()
            assert session.stats()["recorded"] == 0, "the inner hooks are still the inner ones"
        x.exp().sum().backward()
        assert session.stats()["recorded"] > 0


def test_a_transform_that_raises_leaves_the_hooks_set(lms: Make) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("mine")

    with lms() as session:
        with pytest.raises(ValueError, match="mine"):
            grad(fail)(torch.ones(3))
        torch.randn(4, 4, requires_grad=True).exp().sum().backward()
        assert session.stats()["recorded"] > 0


def test_a_session_that_is_closed_inside_a_transform_is_closed(lms: Make) -> None:
    session = lms().open()

    def close(x: Tensor) -> Tensor:
        session.close()
        return x.sum()

    grad(close)(torch.ones(3))
    torch.randn(4, 4, requires_grad=True).exp().sum().backward()
    assert session.stats()["recorded"] == 0
    with lms():
        pass


def test_after_the_session_pytorch_is_as_it_was(lms: Make) -> None:
    before = graph.disable_saved_tensors_hooks
    with lms():
        assert graph.disable_saved_tensors_hooks is not before
    assert graph.disable_saved_tensors_hooks is before


def test_a_session_that_may_not_set_hooks_opens_nothing(lms: Make) -> None:
    with graph.disable_saved_tensors_hooks("none here"), pytest.raises(RuntimeError, match="none here"):
        lms().open()
    assert not optimizer._global_optimizer_post_hooks
    with lms() as session:
        torch.randn(4, 4, requires_grad=True).exp().sum().backward()
        assert session.stats()["recorded"] > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_that_has_a_transform_is_right(lms: Make) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: grad(loss)(x) * 2, backend="aot_eager")
    x = torch.randn(5)
    with lms():
        ours = compiled(x)
    assert torch.equal(ours, grad(loss)(x) * 2)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tensor_that_an_operation_writes_to_after_saving_it_has_its_new_bytes(inplace: bool) -> None:
    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.randn(50, 50, requires_grad=True)
        torch.cos(torch.nn.functional.rrelu(torch.sin(weight) * 1, training=True, inplace=inplace)).sum().backward()
        assert weight.grad is not None
        return weight.grad

    function, plain = torch.rrelu, gradient()
    with Session(budget=0, min_size=0):
        assert all(torch.equal(gradient(), plain) for _ in range(3))
        assert grad(lambda x: torch.nn.functional.rrelu(x).sum())(torch.ones(3)).tolist() == [1, 1, 1]
    assert torch.rrelu is function
