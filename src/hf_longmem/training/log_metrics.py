"""What a log line of language-model training should say besides the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longmem.training.peak_memory import peak_memory
from hf_longmem.training.token_bytes import bytes_per_token


class LogMetricsCallback(TrainerCallback):
    """Add to Trainer's log lines, while training and for evaluations in between, what its loss does not say.

    * ``bits_per_byte`` of a causal language model: the cross entropy of all tokens since the last line, without any
      regulariser, in bits over the bytes of text that they stand for. Not with label smoothing or another loss.
    * ``memory_loss``: the regulariser of a long-term memory, unweighted, a mean over the tokens.
    * ``tokens_per_second``: tokens that are no padding, of all processes, over the time between lines without what
      evaluation and saving took.
    * ``peak_memory_gib``, and ``peak_memory_cuda_gib`` on an NVIDIA card: of the first process.

    Evaluation has the first two with its prefix, so that ``metric_for_best_model="eval_bits_per_byte"`` works; each
    token counts alike, whichever batch it is in. They are in ``trainer.state.log_history``, on the console, and in
    trackers whose callback comes later in ``callbacks``: Trainer puts those of ``report_to`` first, so for them say
    ``report_to="none"`` and ``callbacks=[LogMetricsCallback(tokenizer), TensorBoardCallback()]``.

    Args:
        tokenizer: says how many bytes each token stands for (`bytes_per_token`); without one a token is a byte.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._bytes_V = None if tokenizer is None else bytes_per_token(tokenizer)
        self._hook: RemovableHandle | None = None
        # By whether the model was in training mode.
        self._sums: dict[bool, Tensor | None] = {}
        self._has_memory = False
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch the model."""
        # Training that was interrupted has had no end.
        self._unhook()
        self._sums, self._has_memory, self._seconds, self._since = {}, False, 0.0, None
        self._hook = kwargs["model"].register_forward_hook(self._watch, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was."""
        self._unhook()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, if it stands."""
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the clock where something other than training follows."""
        if control.should_evaluate or control.should_save:
            if args.device.type == "cuda":
                torch.cuda.synchronize(args.device)
            self._stop()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Complete a line of training or evaluation."""
        if self._hook is None or not logs or "train_loss" in logs:
            return
        evaluated = next((name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")), None)
        training = "loss" in logs
        if not training and evaluated is None:
            return
        found = self._means(training, args)
        if training:
            running = self._since is not None
            self._stop()
            if self._seconds > 0:
                found["tokens_per_second"] = found["tokens"] / self._seconds
            self._seconds = 0.0
            self._since = time.perf_counter() if running else None
            found |= {f"{name}_gib": size / 2**30 for name, size in peak_memory().items()}
        else:
            found = {f"{evaluated}_{name}": value for name, value in found.items()}
        found = {name: value for name, value in found.items() if not name.endswith("tokens")}
        logs.update(found)
        state.log_history[-1].update(found)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """What was predicted in between counts for nothing."""
        self._sums.pop(False, None)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    @torch.compiler.disable
    @torch.no_grad()
    def _watch(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        """Add up, without waiting for the device: tokens, labels, their bytes, their nats, labels times memory_loss."""
        tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if tokens is None or not isinstance(outputs, Mapping):
            return
        mask, loss, memory_loss = kwargs.get("attention_mask"), outputs.get("loss"), outputs.get("memory_loss")
        num_tokens = tokens.new_tensor(tokens.shape[0] * tokens.shape[1]) if mask is None else mask.sum()
        labels = kwargs.get("shift_labels")
        if labels is None and kwargs.get("labels") is not None:
            labels = kwargs["labels"][:, 1:]
        zero = torch.zeros((), device=tokens.device)
        count, num_bytes, nats = num_tokens, zero, zero
        if labels is not None and loss is not None and getattr(module, "loss_type", None) == "ForCausalLM":
            labels = labels.to(tokens.device)
            real = labels != -100
            count = num_bytes = real.sum()
            if self._bytes_V is not None:
                self._bytes_V = self._bytes_V.to(tokens.device)
                num_bytes = (self._bytes_V[labels.clamp(min=0)] * real).sum()
            items = kwargs.get("num_items_in_batch")
            nats = loss.float() * (count if items is None else items)
            weight = getattr(getattr(module, "config", None), "memory_kl_weight", 0)
            if module.training and weight and memory_loss is not None:
                nats = nats - weight * memory_loss.float() * count
            # The mean over no label may be no number.
            nats = torch.where(count > 0, nats.to(count.device), 0.0)
        remembered = zero if memory_loss is None else torch.where(count > 0, memory_loss.float() * count, 0.0)
        precise = torch.float32 if tokens.device.type == "mps" else torch.float64
        sums = torch.stack(
            [part.to(tokens.device, precise) for part in (num_tokens, count, num_bytes, nats, remembered)]
        )
        before = self._sums.get(module.training)
        self._sums[module.training] = sums if before is None else before + sums
        self._has_memory = memory_loss is not None

    def _means(self, training: bool, args: TrainingArguments) -> dict[str, float]:
        sums = self._sums.pop(training, None)
        sums = torch.zeros(5, dtype=torch.float64, device=args.device) if sums is None else sums
        if args.world_size > 1:
            torch.distributed.all_reduce(sums)
        tokens, count, num_bytes, nats, remembered = sums.tolist()
        found = {"tokens": tokens}
        if num_bytes:
            found["bits_per_byte"] = nats / math.log(2) / num_bytes
        if count and self._has_memory:
            found["memory_loss"] = remembered / count
        return found


__all__ = ["LogMetricsCallback"]
