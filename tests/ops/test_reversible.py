"""Reversible blocks: gradients, random numbers and ambient state, compared with plain autograd on the same modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_longmem.ops.reversible import ReversibleTape, reversible_block

WIDTH = 6
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Half(nn.Module):
    """Norm, two projections, an activation and dropout: a branch as a layer has it."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.dropout(nn.functional.gelu(self.up(self.norm(x))))
        if mask is not None:
            hidden = hidden + mask
        return self.dropout(self.down(hidden))


class Layer(nn.Module):
    """One layer as the models write it: two bound methods handed to one block."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.3) -> None:
        super().__init__()
        self.attention = Half(width, dropout)
        self.feed_forward = Half(width, dropout)

    def attention_branch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(x, mask)

    def feed_forward_branch(self, x: Tensor) -> Tensor:
        return self.feed_forward(x)

    def forward(self, x1: Tensor, x2: Tensor, tape: ReversibleTape | None, mask: Tensor | None = None):
        f = functools.partial(self.attention_branch, mask=mask)
        return reversible_block(f, self.feed_forward_branch, x1, x2, tape)


class Stack(nn.Module):
    def __init__(self, num_layers: int, dropout: float = 0.3, *, width: int = WIDTH, reversible: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(num_layers))
        self.reversible = reversible

    def outputs(self, x: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        tape = ReversibleTape() if self.reversible else None
        x1 = x2 = self.embed(x).to(x.dtype)  # under autocast too
        outputs = []
        for layer in self.layers:
            x1, x2 = layer(x1, x2, tape, mask)
            outputs.append((x1, x2))
        return outputs

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y1, y2 = self.outputs(x, mask)[-1]
        return (y1 * y1).sin() + y2.cos()


def stack_pair(
    num_layers: int, dropout: float = 0.3, *, dtype=torch.float64, width: int = WIDTH
) -> tuple[Stack, Stack]:
    """The same stack twice: reversible, and by plain autograd."""
    torch.manual_seed(7)
    reversible = Stack(num_layers, dropout, width=width).to(dtype)
    with torch.no_grad():
        for parameter in reversible.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain = copy.deepcopy(reversible)
    plain.reversible = False
    return reversible, plain


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual, expected, tolerance: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert actual[name] is None, name
        else:
            torch.testing.assert_close(actual[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def sample(*shape: int, seed: int = 0, dtype=torch.float64, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)


def backward_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], seed: int = 3) -> dict[str, Tensor | None]:
    """Gradients of a loss, the loss, and where the random stream stands after the backward."""
    torch.manual_seed(seed)
    loss = loss_of(model)
    loss.backward()
    random = {"random": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["random on cuda"] = torch.cuda.get_rng_state()
    return {**gradients(model), "loss": loss.detach(), **random}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_layers", [1, 2, 24])
def test_gradients_with_dropout_equal_plain_autograd(num_layers, device):
    reversible, plain = (model.to(device) for model in stack_pair(num_layers))
    x = sample(2, 5, WIDTH, device=device)
    actual, expected = (backward_of(model, lambda m: m(x).sum()) for model in (reversible, plain))
    assert all(gradient is not None for gradient in expected.values())
    assert_same(actual, expected)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_freezing_and_any_outputs_in_the_loss(data):
    num_layers = data.draw(st.integers(1, 4))
    reversible, plain = stack_pair(num_layers, data.draw(st.sampled_from([0.0, 0.4])))
    names = [name for name, _ in plain.named_parameters()]
    whole = data.draw(st.sampled_from(["embed", "layers.0", "layers.0.attention", "nothing"]))
    frozen = data.draw(st.sets(st.sampled_from(names), max_size=6)) | {n for n in names if n.startswith(whole)}
    for model in (reversible, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    x = sample(3, WIDTH)
    pieces = st.tuples(st.integers(0, num_layers - 1), st.integers(0, 1))
    in_loss = data.draw(st.lists(pieces, min_size=1, max_size=4, unique=True))

    def loss_of(model: Stack) -> Tensor:
        outputs = model.outputs(x)
        return sum(((k + 1) * outputs[k][side]).sin().sum() for k, side in in_loss)

    if not loss_of(plain).requires_grad:
        assert not loss_of(reversible).requires_grad
        return
    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


@settings(deadline=None, max_examples=15)
@given(
    which=st.sampled_from([(True, False), (False, True), (True, True), (False, False)]),
    length=st.sampled_from([1, 63, 65]),
)
def test_streams_that_do_or_do_not_require_grad(which, length):
    reversible, plain = stack_pair(2)
    results = []
    for model in (reversible, plain):
        streams = [sample(length, WIDTH, seed=k).requires_grad_(which[k]) for k in (0, 1)]
        torch.manual_seed(1)
        tape = ReversibleTape() if model.reversible else None
        y1, y2 = streams
        for layer in model.layers:
            y1, y2 = layer(y1, y2, tape)
        (y1.sin() + y2.cos()).sum().backward()
        results.append({**gradients(model), "x1": streams[0].grad, "x2": streams[1].grad})
    assert_same(*results)


def test_frozen_inputs_of_branches_that_begin_with_a_projection():
    """What a projection saves depends on whether its input requires grad; the rerun must save the same."""
    x, results = sample(3, WIDTH), []
    for tape in (ReversibleTape(), None):
        torch.manual_seed(0)
        f, g = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        y1, y2 = reversible_block(f, g, x, x, tape)
        y1, y2 = reversible_block(g, f, y1, y2, tape)
        (y1.sin() * y2).sum().backward()
        results.append({"f": f.weight.grad, "g": g.weight.grad, "bias": f.bias.grad})
    assert_same(*results)


def test_two_forwards_before_one_backward():
    reversible, plain = stack_pair(3)
    loss_of = lambda m: (m(sample(4, WIDTH)) * m(sample(4, WIDTH, seed=1))).sum()  # noqa: E731
    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_accumulation_over_three_batches():
    reversible, plain = stack_pair(3)
    for seed in range(3):
        results = [
            backward_of(m, lambda m, s=seed: m(sample(4, WIDTH, seed=s)).sum(), seed) for m in (reversible, plain)
        ]
    assert_same(*results)


def test_one_tape_for_two_passes_and_shared_layers():
    reversible, plain = stack_pair(1)

    def loss_of(model: Stack) -> Tensor:
        tape = ReversibleTape() if model.reversible else None
        total = torch.zeros((), dtype=torch.float64)
        for seed in (0, 1):
            y1 = y2 = sample(4, WIDTH, seed=seed)
            for _ in range(4):
                y1, y2 = model.layers[0](y1, y2, tape)
            total = total + (y1.sin() * y2).sum()
        return total

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_something_between_two_blocks():
    """Each break starts a new chain: scaling, exchanged streams, a fork; a detached stream breaks nothing."""
    reversible, plain = stack_pair(6)

    def loss_of(model: Stack) -> Tensor:
        tape = ReversibleTape() if model.reversible else None
        y1 = y2 = model.embed(sample(4, WIDTH))
        y1, y2 = model.layers[0](y1, y2, tape)
        y1, y2 = model.layers[1](y1 * 0.5, y2, tape)
        y1, y2 = model.layers[2](y2, y1, tape)
        fork = model.layers[3](y1, y2, tape)
        y1, y2 = model.layers[4](y1, y2, tape)
        y1, y2 = model.layers[5](y1.detach(), y2, tape)
        return sum(t.sin().sum() for t in (y1, y2, *fork))

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_grad_of_one_parameter_and_of_a_middle_output():
    results = []
    for model in stack_pair(4):
        torch.manual_seed(0)
        outputs = model.outputs(sample(5, WIDTH))
        loss = (outputs[-1][0].sin() + outputs[-1][1]).sum()
        wanted = {"w": model.layers[1].attention.up.weight, "y1": outputs[1][0], "y2": outputs[2][1]}
        results.append(dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True)))
    assert_same(*results)


def test_loss_on_a_middle_output_alone_while_the_last_graph_is_gone():
    results = []
    for model in stack_pair(4):
        torch.manual_seed(0)
        middle = model.outputs(sample(5, WIDTH))[1]
        (middle[0].sin() * middle[1]).sum().backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("training", [True, False])
def test_backward_in_the_other_mode_than_the_forward(training):
    reversible, plain = stack_pair(3)

    def loss_of(model: Stack) -> Tensor:
        loss = model.train(training)(sample(4, WIDTH)).sum()
        model.train(not training)
        return loss

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))
    assert all(module.training is not training for module in reversible.modules())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(context):
    reversible, plain = stack_pair(3)
    outputs = []
    for model in (reversible, plain):
        torch.manual_seed(0)
        with context():
            outputs.append(model(sample(4, WIDTH)))
    assert torch.equal(*outputs)
    assert not outputs[0].requires_grad


def test_inference_tensors_as_streams_of_a_frozen_stack():
    with torch.inference_mode():
        x = sample(4, WIDTH)
    y1, _ = ReversibleTape().block(torch.sin, torch.cos, x, x)
    assert torch.equal(y1, x + x.sin())


def test_values_equal_plain_autograd_bit_for_bit():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        reversible, plain = stack_pair(3, dtype=dtype)
        outputs = []
        for model in (reversible, plain):
            torch.manual_seed(0)
            outputs.append(model(sample(4, WIDTH, dtype=dtype)))
        assert torch.equal(*outputs)


def test_random_numbers_after_the_backward_are_those_of_plain_autograd():
    draws = []
    for model in stack_pair(3):
        torch.manual_seed(5)
        loss = model(sample(4, WIDTH)).sum()
        between = torch.rand(3)
        loss.backward()
        draws.append((between, torch.rand(3)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


@pytest.mark.parametrize("num_layers", [1, 6])
def test_autocast_is_entered_again_and_streams_keep_their_dtype(num_layers):
    reversible, plain = stack_pair(num_layers, dropout=0.1, dtype=torch.float32, width=32)
    x = sample(4, 16, 32, dtype=torch.float32)
    results = {}
    for name, model, enabled in (("tape", reversible, True), ("plain", plain, True), ("without", plain, False)):
        model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = model.outputs(x)
        assert {y.dtype for pair in outputs for y in pair} == {torch.float32}
        (outputs[-1][0].sin() + outputs[-1][1]).sum().backward()
        results[name] = torch.cat([p.grad.flatten() for p in model.parameters()])

    def error(name: str) -> float:
        return ((results[name] - results["plain"]).norm() / results["plain"].norm()).item()

    assert error("without") > 1e-3
    assert error("tape") < 0.1 * error("without")


@pytest.mark.parametrize(("stream", "branch"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("tape", [None, ReversibleTape()])
def test_each_sum_stays_in_the_dtype_of_its_stream(stream, branch, tape):
    x = sample(3, WIDTH).to(stream).requires_grad_()
    f = lambda t: t.to(branch).sin()  # noqa: E731
    y1, y2 = reversible_block(f, f, x, x, tape)
    assert y1.dtype == y2.dtype == stream
    (y1 + y2).sum().backward()
    assert x.grad.dtype == stream


def test_default_device_of_the_forward_is_used_again():
    """A branch that makes a tensor without naming a device gets it from the ambient ``torch.device`` context."""
    x = sample(3, WIDTH).requires_grad_()
    seen = []

    def f(t: Tensor) -> Tensor:
        seen.append(torch.get_default_device())
        return t.sin()

    with torch.device("meta"):
        y1, y2 = ReversibleTape().block(f, torch.cos, x, x)
    (y1 * y2).sum().backward()
    assert seen == [torch.device("meta")] * 2


# ---- what else people do with a graph


def test_graph_consumed_twice_with_retain_graph():
    results = []
    for model in stack_pair(3):
        torch.manual_seed(0)
        loss = model(sample(4, WIDTH)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same(*results)


def test_partial_backwards_over_a_retained_graph_in_any_order():
    results = []
    for model in stack_pair(4):
        torch.manual_seed(0)
        outputs = model.outputs(sample(4, WIDTH))
        for k in (1, 3, 0, 2, 2):
            (outputs[k][0].sin() * outputs[k][1]).sum().backward(retain_graph=True)
        results.append(gradients(model))
    assert_same(*results)


def test_double_backward():
    results = []
    for model in stack_pair(3):
        torch.manual_seed(0)
        x = sample(4, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope * slope).sum().backward()
        results.append({**gradients(model), "x": x.grad})
    assert_same(*results)


def test_gradcheck_and_gradgradcheck():
    def run(x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        tape = ReversibleTape()
        for _ in range(2):
            x1, x2 = tape.block(lambda t: torch.tanh(t @ weight), lambda t: (t @ weight).exp(), x1, x2)
        return x1, x2

    inputs = tuple(0.3 * sample(2, 2, seed=k).requires_grad_() for k in range(3))
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_torch_func_transforms():
    reversible, plain = stack_pair(2, dropout=0.0)
    results = []
    for model in (reversible, plain):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        loss = lambda p, m=model: torch.func.functional_call(m, p, (sample(4, WIDTH),)).sum()  # noqa: E731
        results.append(torch.func.grad(loss)(parameters))
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_stack_inside_checkpoint(use_reentrant):
    reversible, plain = stack_pair(3)

    def loss_of(model: Stack) -> Tensor:
        x = sample(4, WIDTH).requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant).sum()

    assert_same(backward_of(reversible, loss_of), backward_of(plain, lambda m: m(sample(4, WIDTH)).sum()))


def test_checkpoint_around_each_layer_and_inside_a_branch():
    reversible, plain = stack_pair(3)

    def loss_of(model: Stack) -> Tensor:
        tape = ReversibleTape() if model.reversible else None
        y1 = y2 = model.embed(sample(4, WIDTH))
        for layer in model.layers:
            inner = lambda t, m=layer.attention: checkpoint(m, t, use_reentrant=False)  # noqa: E731
            whole = functools.partial(reversible_block, inner, layer.feed_forward, tape=tape)
            y1, y2 = checkpoint(whole, y1, y2, use_reentrant=False)
        return (y1.sin() + y2).sum()

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_nested_stacks():
    reversible, plain = stack_pair(4)

    def loss_of(model: Stack) -> Tensor:
        tape = ReversibleTape() if model.reversible else None

        def inner(t: Tensor) -> Tensor:
            y1, y2 = t, t
            for layer in model.layers[1:3]:
                y1, y2 = layer(y1, y2, tape)
            return y1 + y2

        y1 = y2 = model.embed(sample(4, WIDTH))
        y1, y2 = reversible_block(inner, model.layers[0].attention, y1, y2, tape)
        y1, y2 = model.layers[3](y1, y2, tape)
        return (y1.sin() + y2).sum()

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_hooks_on_inner_modules():
    results = []
    for model in stack_pair(3):
        seen: dict[str, Tensor] = {}
        half = model.layers[1].attention
        half.down.register_full_backward_hook(lambda m, gi, go, s=seen: s.update(into=gi[0], out=go[0]))
        half.norm.register_full_backward_pre_hook(lambda m, go, s=seen: s.update(pre=go[0]))
        half.up.register_forward_hook(lambda m, args, out: out * 1.5)
        half.up.weight.register_hook(lambda g: 2 * g)
        torch.manual_seed(0)
        model(sample(4, WIDTH)).sum().backward()
        results.append({**gradients(model), **seen})
    assert_same(*results)


class ScaledExp(torch.autograd.Function):
    """Saves an input, an output and a tensor that is neither, and reads them twice in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = (0.1 * x).exp()
        ctx.save_for_backward(x, out, torch.full_like(x, 0.1))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors[0].shape == grad.shape
        _, out, scale = ctx.saved_tensors
        return grad * out * scale


@torch.library.custom_op("hf_longmem_test::noisy_square", mutates_args=())
def noisy_square(x: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.rand_like(x)
    return x * x * noise, noise


noisy_square.register_autograd(
    lambda ctx, grad, _: 2 * grad * ctx.saved_tensors[0] * ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
)


def test_custom_functions_and_custom_operators_inside_a_branch():
    reversible, plain = stack_pair(3)

    def loss_of(model: Stack) -> Tensor:
        tape = ReversibleTape() if model.reversible else None
        y1 = y2 = model.embed(sample(4, WIDTH))
        for layer in model.layers:
            f = lambda t, m=layer.attention: 0.1 * noisy_square(m(t))[0]  # noqa: E731
            g = lambda t, m=layer.feed_forward: ScaledExp.apply(m(t))  # noqa: E731
            y1, y2 = reversible_block(f, g, y1, y2, tape)
        return (y1.sin() + y2).sum()

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_mask_and_learned_bias_from_outside_the_block():
    reversible, plain = stack_pair(3)

    def loss_of(model: Stack) -> Tensor:
        bias = model.embed.weight.tanh().repeat(1, 2)[:4]  # computed once, read by every layer, needs its gradient
        return model(sample(4, WIDTH), mask=bias).sum()

    assert_same(*(backward_of(model, loss_of) for model in (reversible, plain)))


def test_random_state_is_untouched_by_a_backward_that_fails():
    x = sample(3, WIDTH).requires_grad_()
    calls: Iterator[int] = iter(range(2))

    def f(t: Tensor) -> Tensor:
        if next(calls) == 1:
            raise KeyError("second call")
        return nn.functional.dropout(t, 0.5).sin()

    y1, y2 = ReversibleTape().block(f, torch.cos, x, x)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="second call"):
        (y1 * y2).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


# ---- torch.compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_around_the_model(backend):
    reversible, plain = stack_pair(2, dropout=0.0)
    torch._dynamo.reset()
    compiled = torch.compile(reversible, backend=backend, fullgraph=True)
    compiled(sample(4, WIDTH)).sum().backward()
    plain(sample(4, WIDTH)).sum().backward()
    assert_same(gradients(reversible), gradients(plain))


def test_compiled_branches_inside_blocks():
    reversible, plain = stack_pair(3, dropout=0.0)
    torch._dynamo.reset()
    for layer in reversible.layers:
        layer.feed_forward.compile(backend="aot_eager")
    assert_same(*(backward_of(model, lambda m: m(sample(4, WIDTH)).sum()) for model in (reversible, plain)))
