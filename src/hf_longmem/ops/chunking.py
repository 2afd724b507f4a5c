"""Work done chunk by chunk, so that memory does not grow with the length: any function, and the language-model loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops._blocks import wide_dtype

__all__ = ["apply_in_chunks", "chunked_linear_cross_entropy"]


def apply_in_chunks(fn: Callable[..., Tensor], chunk_size: int, dim: int, *inputs: Tensor) -> Tensor:
    """Compute ``cat([fn(chunk) for chunk in inputs], dim)``.

    Equals ``fn(*inputs)``, outputs and gradients, for every ``fn`` that treats each position along ``dim`` alone.

    Args:
        fn: maps tensors cut along ``dim`` to one tensor of the same size along ``dim``.
        chunk_size: positions per call; the last chunk holds what is left. 0 means all at once.
        dim: the axis that is cut, the same in every input and in the output.
        inputs: at least one tensor; all of one size along ``dim``.

    Raises:
        ValueError: if ``chunk_size`` is negative, ``inputs`` is empty, or the sizes along ``dim`` differ.

    Source: Kitaev, Kaiser, Levskaya 2020 (arXiv 2001.04451), section 3, "chunking".

    >>> apply_in_chunks(torch.square, 2, 0, torch.arange(5))
    tensor([ 0,  1,  4,  9, 16])
    """
    if chunk_size < 0:
        raise ValueError(complaint("chunk_size must be 0 (no chunks) or more", chunk_size, "use 0 or a positive size"))
    if not inputs:
        raise ValueError(complaint("apply_in_chunks needs at least one tensor", "none", "pass the inputs of fn"))
    sizes = [tensor.size(dim) for tensor in inputs]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(complaint(f"inputs must be of one size along dim {dim}", sizes, "expand or cut them first"))
    if chunk_size == 0 or sizes[0] <= chunk_size:
        return fn(*inputs)
    chunks = zip(*(tensor.split(chunk_size, dim) for tensor in inputs), strict=True)
    return torch.cat([fn(*chunk) for chunk in chunks], dim)


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    num_items: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of a linear head, ``mean_t [logsumexp(z_t) - z_t[label_t]]`` with ``z = hidden weight^T + bias``.

    Equals ``F.cross_entropy(F.linear(hidden, weight, bias), labels)``, but at most ``chunk_size x V`` logits exist at
    once, in forward and in backward, and tokens with ``ignore_index`` cost nothing. Under autocast the products are
    taken in its dtype, as by ``F.linear``; softmax, loss and sums over chunks are float32 (float64 for float64 inputs).

    The gradient is computed in the forward, while a chunk's probabilities are at hand: three products of the size of
    the logits, where recomputing them would take four. The price is that the weight's gradient exists twice for a
    moment in backward. It is kept unscaled, so that a small ``1 / num_items`` does not underflow in float16.

    Args:
        hidden: ``[T, E]`` or ``[B, T, E]``, floating.
        weight: ``[V, E]``, the head (or the tied embedding).
        bias: ``[V]`` or None.
        labels: already shifted integers in ``[0, V)`` or ``ignore_index``, of ``hidden``'s shape without its last axis.
        chunk_size: counted tokens per chunk; 0 means all at once.
        ignore_index: the label of tokens that do not count.
        num_items: what to divide the sum by (Trainer's ``num_items_in_batch``) instead of the number of counted labels.
        label_smoothing: epsilon; the target is ``(1 - epsilon) * onehot + epsilon / V``.

    Returns:
        A scalar, float32 (float64 for float64 inputs). With no counted label, 0 with zero gradients.

    Raises:
        ValueError: for shapes, dtypes or values that do not fit together (labels' values are checked on the CPU only:
            elsewhere the check would wait for the device).
        RuntimeError: from a second derivative, which is not available.
    """
    _check_shapes(hidden, weight, bias, labels)
    if chunk_size < 0:
        raise ValueError(complaint("chunk_size must be 0 (no chunks) or more", chunk_size, "use 0 or a positive size"))
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(complaint("label_smoothing must lie in [0, 1]", label_smoothing, "use for example 0.1"))
    track = torch.is_grad_enabled()
    total, count, *_ = _summed_loss(
        hidden.flatten(0, -2),
        weight,
        bias,
        labels.flatten().long(),  # an unsigned type could not hold ignore_index
        chunk_size,
        ignore_index,
        label_smoothing,
        _product_dtype(hidden, weight),
        track and hidden.requires_grad,
        track and weight.requires_grad,
        track and bias is not None and bias.requires_grad,
    )
    if num_items is None:
        items = count
    elif isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(complaint("num_items must be one number", tuple(num_items.shape), "pass a scalar tensor"))
        items = num_items.detach().to(total.device).reshape(())
    else:
        items = torch.full_like(count, num_items)
    return total / items.clamp(min=1)


def _check_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.size(-1) != weight.size(1):
        received = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(
            complaint(
                "hidden must be [..., T, E] and weight [V, E]",
                received,
                "pass the head's own weight, not its transpose",
            )
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(complaint(f"bias must have shape ({weight.size(0)},)", tuple(bias.shape), "pass [V] or None"))
    if labels.shape != hidden.shape[:-1]:
        received = f"{tuple(labels.shape)} for hidden {tuple(hidden.shape)}"
        raise ValueError(
            complaint("labels must have hidden's shape without its last axis", received, "shift both alike")
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(complaint("labels must be integers", labels.dtype, "pass class indices, for example int64"))


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype ``F.linear`` would multiply in: autocast's, else that of both operands."""
    device_type = hidden.device.type
    half_allowed = torch.float64 not in (hidden.dtype, weight.dtype)
    if half_allowed and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if hidden.dtype != weight.dtype:
        received = f"{hidden.dtype} and {weight.dtype}"
        raise ValueError(complaint("hidden and weight must share a dtype", received, "cast one, or run under autocast"))
    return hidden.dtype


# An operator of its own, so that compile and export see one node. It waits for the number of counted labels, which a
# CUDA graph cannot record.
@torch.library.custom_op("hf_longmem::summed_linear_cross_entropy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _summed_loss(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    chunk_size: int,
    ignore_index: int,
    label_smoothing: float,
    product_dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss, the number of counted labels and the sum's gradients (empty where not needed)."""
    wide = wide_dtype(product_dtype)
    grad_hidden_TE, grad_weight_VE, grad_bias_V = _gradient_buffers(
        hidden_TE, weight_VE, wide, need_hidden, need_weight, need_bias
    )
    total = hidden_TE.new_zeros((), dtype=wide)
    counted = labels_T != ignore_index
    rows_X = counted.nonzero().squeeze(1)
    num_classes = weight_VE.size(0)
    if labels_T.device.type == "cpu" and rows_X.numel():
        low, high = labels_T[rows_X].aminmax()
        if low < 0 or high >= num_classes:
            found = int(low) if low < 0 else int(high)
            rule = f"labels must be ignore_index ({ignore_index}) or lie in [0, {num_classes})"
            raise ValueError(complaint(rule, found, "check the labels against the head's vocabulary"))
    with torch.autocast(hidden_TE.device.type, enabled=False):
        weight_VE = weight_VE.to(product_dtype)
        for rows_C in rows_X.split(chunk_size or max(rows_X.numel(), 1)):
            hidden_CE = hidden_TE[rows_C].to(product_dtype)
            loss, grad_CV = _chunk_loss(
                hidden_CE,
                weight_VE,
                bias_V,
                labels_T[rows_C].long(),
                label_smoothing,
                need_hidden or need_weight or need_bias,
            )
            total += loss
            if need_bias:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(product_dtype)
            if need_hidden:
                grad_hidden_TE[rows_C] = torch.mm(grad_CV, weight_VE).to(grad_hidden_TE.dtype)
            if need_weight and product_dtype == wide:
                grad_weight_VE.addmm_(grad_CV.t(), hidden_CE)
            elif need_weight:
                grad_weight_VE += torch.mm(grad_CV.t(), hidden_CE)
            del grad_CV  # or the next chunk's logits would lie beside it
    return total, counted.sum(), grad_hidden_TE, grad_weight_VE, grad_bias_V


def _chunk_loss(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    label_C: Tensor,
    label_smoothing: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk and its gradient with respect to the logits (undefined unless ``need_grad``)."""
    label_C1 = label_C.unsqueeze(1)
    logits_CV = torch.mm(hidden_CE, weight_VE.t()).to(wide_dtype(hidden_CE.dtype))
    if bias_V is not None:
        logits_CV += bias_V
    # From here on one buffer turns from logits into probabilities into the gradient of the logits.
    peak_C1 = logits_CV.amax(1, keepdim=True)
    target_C1 = (1.0 - label_smoothing) * logits_CV.gather(1, label_C1)
    if label_smoothing:
        target_C1 += label_smoothing * logits_CV.mean(1, keepdim=True)
    prob_CV = logits_CV.sub_(peak_C1).exp_()
    mass_C1 = prob_CV.sum(1, keepdim=True)
    loss = (peak_C1 + mass_C1.log() - target_C1).sum()
    if not need_grad:
        return loss, prob_CV
    grad_CV = prob_CV.div_(mass_C1)
    grad_CV.scatter_add_(1, label_C1, grad_CV.new_full(label_C1.shape, label_smoothing - 1.0))
    if label_smoothing:
        grad_CV -= label_smoothing / weight_VE.size(0)
    return loss, grad_CV


def _gradient_buffers(
    hidden_TE: Tensor, weight_VE: Tensor, wide: torch.dtype, need_hidden: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros in the shape of each gradient that is needed, empty tensors for the others; sums over chunks are wide."""
    grad_hidden_TE = torch.zeros_like(hidden_TE) if need_hidden else hidden_TE.new_empty(0)
    grad_weight_VE = weight_VE.new_zeros(weight_VE.shape if need_weight else 0, dtype=wide)
    grad_bias_V = weight_VE.new_zeros(weight_VE.size(0) if need_bias else 0, dtype=wide)
    return grad_hidden_TE, grad_weight_VE, grad_bias_V


@_summed_loss.register_fake
def _(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    chunk_size: int,
    ignore_index: int,
    label_smoothing: float,
    product_dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(product_dtype)
    buffers = _gradient_buffers(hidden_TE, weight_VE, wide, need_hidden, need_weight, need_bias)
    return hidden_TE.new_zeros((), dtype=wide), labels_T.new_zeros((), dtype=torch.int64), *buffers


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden_TE, weight_VE, bias_V, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.dtypes = (hidden_TE.dtype, weight_VE.dtype, None if bias_V is None else bias_V.dtype)
    ctx.needed = inputs[-3:]
    ctx.save_for_backward(*output[2:])


def _scale_gradients(ctx: Any, grad_total: Tensor | None, *others: Tensor | None) -> tuple:
    if any(grad is not None for grad in others):
        raise RuntimeError(
            complaint(
                "chunked_linear_cross_entropy has first derivatives only",
                "a request for a second one",
                "use F.cross_entropy(F.linear(...)) for double backward",
            )
        )
    if grad_total is None:
        return (None,) * 11
    scaled = [
        (grad.to(grad_total.dtype) * grad_total).to(dtype) if needed else None
        for grad, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needed, strict=True)
    ]
    return *scaled, *(None,) * 8


_summed_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)
