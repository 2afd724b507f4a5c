from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_longmem.ops.continuous import (
    GaussianBasis,
    MemoryState,
    RegressionSpec,
    WriteMaps,
    convolution_gate,
    decay_tau,
    detach_memory,
    empty_memory,
    naive,
    read_memory,
    record_attention,
    reset_memory,
    select_write_maps,
    sticky_positions,
    sticky_samples,
    uniform_write_maps,
    write_maps,
    write_memory,
)

FEW = settings(max_examples=10, deadline=None)
BASIS = GaussianBasis(10, (0.05, 0.1))
SPEC = RegressionSpec(BASIS, 5, 7)
DECAYS: list[Any] = [0.75, "uniform"]


def step_maps(decay: Any, state: MemoryState, dtype: torch.dtype) -> WriteMaps:
    if decay == "uniform":
        return select_write_maps(uniform_write_maps(SPEC, 8, dtype=dtype), state.segments_B)
    return write_maps(SPEC, decay, dtype=dtype)


def same(ours: MemoryState, wanted: MemoryState) -> bool:
    """Compare bit patterns: -0.0 is not 0.0, and a NaN equals itself."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, wanted, strict=True))


def filled(batch_size: int, writes: int, dtype: torch.dtype = torch.float32) -> MemoryState:
    state = empty_memory(batch_size, 10, 3, dtype=dtype)
    for _ in range(writes):
        state = write_memory(state, torch.randn(batch_size, 5, 3, dtype=dtype), write_maps(SPEC, 0.75, dtype=dtype))
    mu, variance = torch.rand(batch_size, 2, 4, dtype=dtype), torch.rand(batch_size, 2, 4, dtype=dtype) * 0.01 + 1e-3
    return record_attention(state, mu, variance)


@pytest.mark.parametrize("decay", DECAYS)
def test_rows_at_different_counts_each_follow_the_naive_twin(decay: Any) -> None:
    """Rows write at different steps of one batch; each equals its own story, told one segment at a time."""
    state = empty_memory(3, 10, 3, dtype=torch.float64)
    told: list[tuple[Tensor | None, int]] = [(None, 0)] * 3
    for step in range(6):
        x = torch.randn(3, 5, 3, dtype=torch.float64)
        write = torch.tensor([True, step % 2 == 1, step >= 4])
        state = write_memory(state, x, step_maps(decay, state, torch.float64), write_B=write)
        for row in range(3):
            if write[row]:
                old, count = told[row]
                tau = decay_tau(decay, max(count, 1))
                told[row] = naive.write_memory(old, x[row], SPEC, tau), count + 1
    for row, (wanted, count) in enumerate(told):
        assert wanted is not None
        assert (state.coefficients_BNE[row] - wanted).abs().max() < 1e-9
        assert state.segments_B[row] == count


@pytest.mark.parametrize("width", [3, 40], ids=["fewer numbers than samples", "more numbers than samples"])
def test_sticky_writes_follow_the_naive_twin(width: int) -> None:
    """The write multiplies in the order that is less work, which differs between the two widths."""
    maps = write_maps(SPEC, 0.75, sticky=True, dtype=torch.float64)
    state = empty_memory(2, 10, width, dtype=torch.float64)
    told: list[Tensor | None] = [None, None]
    for _ in range(4):
        mu, variance = torch.rand(2, 2, 4).double(), torch.rand(2, 2, 4).double() * 0.02 + 1e-3
        state = record_attention(state, mu, variance)
        positions = sticky_positions(state.histogram_BK, 7)
        x = torch.randn(2, 5, width, dtype=torch.float64)
        for row in range(2):
            histogram = naive.attention_histogram(mu[row], variance[row], 128)
            where = torch.tensor(naive.sticky_positions(histogram.tolist(), 7), dtype=torch.float64)
            assert (positions[row] - where).abs().max() < 1e-9
            told[row] = naive.write_memory(told[row], x[row], SPEC, 0.75, where)
        state = write_memory(state, x, maps, samples_BMN=sticky_samples(positions, BASIS))
        for row in range(2):
            assert (state.coefficients_BNE[row] - told[row]).abs().max() < 1e-8


def test_evenly_spread_attention_makes_sticky_the_same_as_plain() -> None:
    old = filled(2, 2, torch.float64)
    state = old._replace(histogram_BK=torch.ones(2, 128, dtype=torch.float64))
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    samples = sticky_samples(sticky_positions(state.histogram_BK, 7), BASIS)
    sticky = write_memory(state, x, write_maps(SPEC, 0.75, sticky=True, dtype=torch.float64), samples_BMN=samples)
    plain = write_memory(state, x, write_maps(SPEC, 0.75, dtype=torch.float64))
    assert (sticky.coefficients_BNE - plain.coefficients_BNE).abs().max() < 1e-12


@FEW
@given(write=st.lists(st.booleans(), min_size=4, max_size=4), reset=st.lists(st.booleans(), min_size=4, max_size=4))
def test_rows_that_do_not_write_keep_their_state_and_reset_rows_are_as_new(
    write: list[bool], reset: list[bool]
) -> None:
    before = filled(4, 3)
    if reset[0]:  # even a memory that was spoilt
        before.coefficients_BNE[0, 0] = torch.nan
        before.histogram_BK[0] = -torch.inf
    wiped = reset_memory(before, torch.tensor(reset))
    nonsense = torch.where(torch.tensor(write)[:, None, None], torch.randn(4, 5, 3), torch.nan)
    after = write_memory(wiped, nonsense, write_maps(SPEC, 0.75), write_B=torch.tensor(write))
    fresh = empty_memory(4, 10, 3)
    as_new = write_memory(fresh, nonsense, write_maps(SPEC, 0.75))
    for row in range(4):
        old, new = (MemoryState(*(part[row : row + 1] for part in state)) for state in (wiped, after))
        assert same(old, MemoryState(*(part[row : row + 1] for part in (fresh if reset[row] else before))))
        if not write[row]:
            assert same(new, old)
        elif reset[row]:
            assert same(new, MemoryState(*(part[row : row + 1] for part in as_new)))
    assert after.coefficients_BNE.isfinite().all()


@pytest.mark.parametrize("decay", DECAYS)
def test_a_row_is_the_same_alone_and_in_any_batch(decay: Any) -> None:
    x = torch.randn(4, 3, 5, 3)  # steps, rows, L, E
    together = empty_memory(3, 10, 3)
    for step in range(4):
        together = write_memory(together, x[step], step_maps(decay, together, torch.float32))
    alone = empty_memory(1, 10, 3)
    for step in range(4):
        alone = write_memory(alone, x[step, 1:2], step_maps(decay, alone, torch.float32))
    assert (together.coefficients_BNE[1:2] - alone.coefficients_BNE).abs().max() < 1e-6


def test_masked_rows_get_no_gradient_and_a_reset_cuts_the_graph() -> None:
    x = torch.randn(2, 3, 5, 3, requires_grad=True)
    state = write_memory(
        empty_memory(3, 10, 3), x[0], write_maps(SPEC, 0.75), write_B=torch.tensor([True, True, False])
    )
    state = reset_memory(state, torch.tensor([False, True, False]))
    state = write_memory(state, x[1], write_maps(SPEC, 0.75), write_B=torch.tensor([True, True, False]))
    state.coefficients_BNE.square().sum().backward()
    assert x.grad is not None
    touched = x.grad.abs().sum(dim=(2, 3)) > 0
    assert touched.tolist() == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize("segments", [1, 2])
def test_gradients_of_writing_equal_those_of_the_naive_twin(segments: int) -> None:
    """With one segment of back-propagation, earlier segments get none; with two, what the naive twin gives them."""
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    maps = write_maps(SPEC, 0.75, dtype=torch.float64)
    state = write_memory(empty_memory(1, 10, 3, dtype=torch.float64), x[:1], maps)
    state = write_memory(detach_memory(state) if segments == 1 else state, x[1:], maps)
    (ours,) = torch.autograd.grad(state.coefficients_BNE.sin().sum(), x)
    first = naive.write_memory(None, x[0], SPEC, 0.75)
    second = naive.write_memory(first.detach() if segments == 1 else first, x[1], SPEC, 0.75)
    (wanted,) = torch.autograd.grad(second.sin().sum(), x)
    assert (ours - wanted).abs().max() < 1e-9
    assert (ours[0].abs().sum() == 0) == (segments == 1)


@pytest.mark.parametrize("decay", [0.5, 0.75, 0.97, "uniform"])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_half_precision_writes_neither_overflow_nor_grow(
    decay: Any, sticky: bool, dtype: torch.dtype
) -> None:
    spec = RegressionSpec(GaussianBasis(32, (0.02, 0.05)), 16, 48)
    table = (
        uniform_write_maps(spec, 16, sticky=sticky) if decay == "uniform" else write_maps(spec, decay, sticky=sticky)
    )
    state = empty_memory(2, 32, 4)
    largest = []
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for _ in range(1000):
            maps = select_write_maps(table, state.segments_B) if decay == "uniform" else table
            samples = None
            if sticky:
                state = record_attention(state, torch.rand(2, 1, 3).to(dtype), torch.full((2, 1, 3), 0.01, dtype=dtype))
                samples = sticky_samples(sticky_positions(state.histogram_BK, 48), spec.basis)
            state = write_memory(state, torch.randn(2, 16, 4).to(dtype), maps, samples_BMN=samples)
            largest.append(state.coefficients_BNE.abs().max().item())
    assert state.coefficients_BNE.dtype == torch.float32
    assert state.coefficients_BNE.isfinite().all()
    assert max(largest[500:]) < 2 * max(largest[:500])
    assert state.segments_B.tolist() == [1000, 1000]


def test_autocast_does_not_round_the_memory() -> None:
    x = torch.randn(2, 5, 3)
    before = filled(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = write_memory(before, x, write_maps(SPEC, 0.75))
    assert same(inside, write_memory(before, x, write_maps(SPEC, 0.75)))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_write_costs_the_same_after_one_segment_and_after_a_thousand(decay: Any) -> None:
    costs = []
    for segments in (1, 1000):
        state = empty_memory(2, 10, 3)._replace(segments_B=torch.tensor([segments, segments]))
        with FlopCounterMode(display=False) as counter:
            write_memory(state, torch.randn(2, 5, 3), step_maps(decay, state, torch.float32))
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] > 0


def test_writing_and_reading_are_deterministic_and_leave_the_old_state_alone() -> None:
    before = filled(2, 3)
    kept = MemoryState(*(part.clone() for part in before))
    x, query_mask = torch.randn(2, 5, 3), torch.ones(2, 4, dtype=torch.bool)
    seed = torch.get_rng_state()

    def step() -> MemoryState:
        state = record_attention(
            before, torch.full((2, 1, 4), 0.3), torch.full((2, 1, 4), 0.01), query_mask_BT=query_mask
        )
        samples = sticky_samples(sticky_positions(state.histogram_BK, 7), BASIS)
        return write_memory(state, x, write_maps(SPEC, 0.75, sticky=True), samples_BMN=samples)

    assert same(step(), step())
    assert same(before, kept)
    assert torch.equal(torch.get_rng_state(), seed)


def test_what_was_just_written_can_be_read_back() -> None:
    basis = GaussianBasis(64, (0.02, 0.05))
    spec = RegressionSpec(basis, 16, 64, 0.1)
    old, new = torch.randn(1, 1, 6), torch.randn(1, 1, 6)
    state = write_memory(empty_memory(1, 64, 6), old.expand(1, 16, 6), write_maps(spec, 0.5))
    state = write_memory(state, new.expand(1, 16, 6), write_maps(spec, 0.5))
    values = state.coefficients_BNE[:, None]
    for target, wanted in ((0.25, old), (0.75, new)):
        keys = torch.zeros(1, 1, 2, 6)
        keys[..., 0, :] = torch.logit(torch.tensor(target)) / 6**0.5  # with a query of ones: mu = target
        keys[..., 1, :] = -10.0
        context = read_memory(torch.ones(1, 1, 1, 6), keys, values, basis, variance_floor=1e-6).context_BHTD
        assert (context[0, 0] - wanted[0]).abs().max() < 0.05


# --- where attention went, and where to sample


def test_histogram_is_the_mass_of_every_counted_query_in_each_bin() -> None:
    mu, variance = torch.rand(2, 3, 4).double(), torch.rand(2, 3, 4).double() * 0.1 + 1e-3
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]])
    state = empty_memory(2, 10, 3, num_bins=16, dtype=torch.float64)
    state = record_attention(
        record_attention(state, mu, variance, query_mask_BT=mask), mu, variance, query_mask_BT=mask
    )
    for row in range(2):
        counted = naive.attention_histogram(mu[row][:, mask[row]], variance[row][:, mask[row]], 16)
        assert (state.histogram_BK[row] - 2 * counted).abs().max() < 1e-9


def test_padding_queries_cannot_poison_the_histogram_and_no_gradient_is_kept() -> None:
    mu = torch.tensor([[[0.5, torch.nan]]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    state = record_attention(empty_memory(1, 10, 3), mu, torch.full((1, 1, 2), 0.01), query_mask_BT=mask)
    assert state.histogram_BK.isfinite().all()
    assert not state.histogram_BK.requires_grad


def test_a_write_starts_the_histogram_anew_in_the_rows_that_write() -> None:
    before = filled(2, 1)
    after = write_memory(before, torch.randn(2, 5, 3), write_maps(SPEC, 0.75), write_B=torch.tensor([True, False]))
    assert (after.histogram_BK[0] == 0).all()
    assert torch.equal(after.histogram_BK[1], before.histogram_BK[1])


@FEW
@given(histogram=st.lists(st.integers(0, 9), min_size=1, max_size=12), num_samples=st.integers(1, 30))
def test_positions_invert_the_cumulative_histogram(histogram: list[int], num_samples: int) -> None:
    ours = sticky_positions(torch.tensor([histogram], dtype=torch.float64), num_samples)[0]
    wanted = naive.sticky_positions([float(mass) for mass in histogram] if any(histogram) else [1.0], num_samples)
    # At a level on the border of two filled bins with empty ones between, either end has the same CDF.
    edges = torch.tensor([0.0, *histogram], dtype=torch.float64).cumsum(dim=0)
    level = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples * edges[-1]
    on_border = torch.isclose(level[:, None], edges).any(dim=1)
    assert ((ours - torch.tensor(wanted, dtype=torch.float64)).abs()[~on_border] < 1e-9).all()
    assert (ours.diff() >= 0).all()
    assert ((ours >= 0) & (ours <= 1)).all()


def test_a_row_without_attention_is_sampled_evenly_whatever_the_others_do() -> None:
    histogram = torch.zeros(2, 128)
    histogram[1, 64] = 5.0
    positions = sticky_positions(histogram, 4)
    assert torch.allclose(positions[0], torch.tensor([0.125, 0.375, 0.625, 0.875]))
    assert ((positions[1] >= 0.5) & (positions[1] <= 65 / 128)).all()
    assert torch.equal(positions[1], sticky_positions(histogram[1:], 4)[0])


def test_sampling_follows_attention_in_distribution() -> None:
    mass = torch.tensor([[1.0, 0.0, 3.0, 4.0]])
    for draw in ("inverse_cdf", "multinomial"):
        positions = sticky_positions(mass, 4000, draw=draw, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        share = torch.histc(positions, 4, 0, 1) / 4000
        assert (share - mass[0] / 8).abs().max() < 0.03  # four standard errors of 4,000 draws


def test_multinomial_draws_belong_to_their_generator() -> None:
    histogram = torch.rand(2, 128)

    def draw(seed: int) -> Tensor:
        return sticky_positions(histogram, 20, draw="multinomial", generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)
    left = sticky_positions(
        histogram, 20, draw="multinomial", generator=torch.Generator().manual_seed(1), point="left_edge"
    )
    assert torch.allclose(draw(1) - left, torch.full((2, 20), 0.5 / 128))


# --- gate, graph, complaints


def test_gate_weakens_what_is_written_and_closes_on_demand() -> None:
    x, weight = torch.randn(2, 5, 3), torch.randn(3, 3, 3)
    gated = convolution_gate(x, weight, None)
    assert (gated.abs() <= x.abs()).all()
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    scores = sum(padded[:, k : k + 5] @ weight[:, :, k].T for k in range(3))
    assert torch.allclose(gated, x * torch.sigmoid(scores), atol=1e-6)
    assert convolution_gate(x, weight, torch.full((3,), -1e4)).abs().max() == 0


@pytest.mark.parametrize("decay", DECAYS)
def test_a_step_compiles_into_one_graph(decay: Any) -> None:
    """Nothing in a step asks the host what is on the device, and the cached maps become constants."""

    def step(state: MemoryState, q: Tensor, keys: Tensor, x: Tensor, write: Tensor) -> tuple[Tensor, MemoryState]:
        read = read_memory(q, keys, state.coefficients_BNE[:, None], BASIS, written_B=state.segments_B > 0)
        state = record_attention(state, read.mu_BHT, read.variance_BHT)
        if decay == "uniform":
            return read.context_BHTD, write_memory(state, x, step_maps(decay, state, torch.float32), write_B=write)
        samples = sticky_samples(sticky_positions(state.histogram_BK, 7), BASIS)
        maps = write_maps(SPEC, decay, sticky=True)
        return read.context_BHTD, write_memory(state, x, maps, write_B=write, samples_BMN=samples)

    inputs = (torch.randn(2, 1, 4, 3), torch.randn(2, 1, 2, 3), torch.randn(2, 5, 3), torch.tensor([True, False]))
    compiled: Callable[..., tuple[Tensor, MemoryState]] = torch.compile(step, backend="aot_eager", fullgraph=True)
    for state in (empty_memory(2, 10, 3), filled(2, 3)):
        context, after = compiled(state, *inputs)
        wanted_context, wanted = step(state, *inputs)
        assert torch.allclose(context, wanted_context, atol=1e-6)
        for ours, theirs in zip(after, wanted, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


def test_impossible_writes_are_named_and_change_nothing() -> None:
    before = filled(2, 2)
    kept = MemoryState(*(part.clone() for part in before))
    x, maps, sticky = torch.randn(2, 5, 3), write_maps(SPEC, 0.75), write_maps(SPEC, 0.75, sticky=True)
    for bad in (x[:, :4], x[:1], x[..., :2], x[0]):
        with pytest.raises(ValueError, match=r"a segment must have shape \(2, 5, 3\), got"):
            write_memory(before, bad, maps)
    with pytest.raises(ValueError, match="the maps must be for the memory's 10 basis functions, got 8"):
        write_memory(before, x, write_maps(RegressionSpec(GaussianBasis(8, (0.1,)), 5, 7), 0.75))
    with pytest.raises(ValueError, match="samples_BMN and sticky maps go together"):
        write_memory(before, x, sticky)
    with pytest.raises(ValueError, match="samples_BMN and sticky maps go together"):
        write_memory(before, x, maps, samples_BMN=torch.zeros(2, 7, 10))
    for rows in (torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(1, 2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="write_B must hold one bool for each of the 2 rows"):
            write_memory(before, x, maps, write_B=rows)
        with pytest.raises(ValueError, match="reset_B must hold one bool for each of the 2 rows"):
            reset_memory(before, rows)
    assert same(before, kept)


def test_impossible_memories_and_positions_are_named() -> None:
    with pytest.raises(ValueError, match=r"memory must be float32 or float64, got torch\.bfloat16"):
        empty_memory(1, 10, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        sticky_positions(torch.ones(1, 8), 0)
    with pytest.raises(ValueError, match="draw must be one of"):
        sticky_positions(torch.ones(1, 8), 4, draw="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="point must be one of"):
        sticky_positions(torch.ones(1, 8), 4, draw="multinomial", point="right_edge")  # type: ignore[arg-type]
