"""The segment loop of one call: write what is full, let the model read a block, keep what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.models.memory_augmented.attachment import BlockReading, reading
from hf_longmem.models.memory_augmented.blocks import Block, plan_blocks
from hf_longmem.models.memory_augmented.cache import BlockCache
from hf_longmem.models.memory_augmented.outputs import MemoryAugmentedOutput
from hf_longmem.models.memory_augmented.state import MemoryAugmentedState
from hf_longmem.models.segments import append, gather_tokens, join_tokens, take_tokens, token_order


class SegmentLoop:
    """Reads the tokens of one call.

    Args:
        model: a `MemoryAugmentedForCausalLM`.
        state: what it remembers.
        block: the cache of the block that it read last, if there is one; changed in place.
        keeps_block: whether to keep the cache of the last block.
    """

    def __init__(
        self, model: Any, state: MemoryAugmentedState, block: BlockCache | None, *, keeps_block: bool = False
    ) -> None:
        self.model = model
        self.base = model.language_model
        self.memory = model.config.memory
        self.attentions = dict(zip(self.memory.memory_layers, model.long_term_memory.layers.values(), strict=True))
        self.state = state
        self.block = block
        self.keeps_block = keeps_block

    def run(
        self, tokens: Tensor, counts: list[int], real_BT: Tensor | None, last: int, output_hidden_states: bool
    ) -> MemoryAugmentedOutput:
        """Read.

        Args:
            tokens: ids ``[B, T]`` or embeddings ``[B, T, E]``, each row's real tokens first.
            counts: how many of them are real in each row.
            real_BT: where in the call the real tokens stood, None for everywhere.
            last: of how many positions of the call, counted from its end, logits are wanted.
            output_hidden_states: whether the model's are wanted, at the same positions.

        Returns:
            Logits in the call's order as ``last_hidden_state``. `state` and `block` are those after the call.
        """
        tokens = self._same_kind(tokens)
        widths = (self.state.window.shape[1], self.state.inputs[0].shape[1])
        seen: list[int] = self.state.seen_B.tolist()
        blocks = list(
            plan_blocks(seen, counts, self.memory.segment_length, self.memory.window_length, widths, tokens.device)
        )
        order_BT, first = _order(blocks, counts, tokens.shape[1], real_BT, last)
        outputs: list[Sequence[Tensor]] = []
        for number, block in enumerate(blocks):
            if torch.is_grad_enabled() and number % self.memory.bptt_segments == 0:
                self.state = self.state.detach()
            if block.write:
                self._write(block)
            is_last = number == len(blocks) - 1
            found = self._advance(block, take_tokens(tokens, block), number >= first, output_hidden_states, is_last)
            if number >= first:
                outputs.append(found)
        logits, divergence, *hidden_states = (join_tokens(parts, order_BT) for parts in zip(*outputs, strict=True))
        if torch.is_grad_enabled() and not any(block.write for block in blocks):
            for attention in self.attentions.values():
                logits = logits + attention.unused().to(logits.device, logits.dtype)
        self.state = replace(self.state.detach(), seen_B=self.state.seen_B + torch.tensor(counts, device="cpu"))
        return MemoryAugmentedOutput(
            last_hidden_state=logits,  # type: ignore[arg-type]
            memory_loss=divergence[..., 0] / len(self.attentions),  # type: ignore[arg-type]
            hidden_states=tuple(hidden_states) if output_hidden_states else None,  # type: ignore[arg-type]
        )

    def _same_kind(self, tokens: Tensor) -> Tensor:
        """Make ids embeddings where the call and what came before it are not the same."""
        embed = self.model.get_input_embeddings()
        if tokens.dim() < self.state.window.dim():
            return embed(tokens)
        if tokens.dim() > self.state.window.dim():
            self.state = replace(self.state, window=embed(self.state.window))
        return tokens

    def _write(self, block: Block) -> None:
        memories = tuple(
            attention.write(memory, inputs_BSE[:, : self.memory.segment_length], block.write_B)
            for attention, memory, inputs_BSE in zip(
                self.attentions.values(), self.state.memories, self.state.inputs, strict=True
            )
        )
        self.state = replace(self.state, memories=memories, projections=())

    def _advance(
        self, block: Block, new: Tensor, wanted: bool, output_hidden_states: bool, is_last: bool
    ) -> Sequence[Tensor]:
        """Let the model read a block.

        Returns:
            If wanted, of its new tokens, first ones first: logits, regulariser ``[B, T, 1]``, hidden states if wanted.
        """
        window = append(self.state.window, new, block.window_move)
        old = self.block if block.follows else None
        tokens, positions, mask = new, block.places_BT, None
        if old is None:
            stretch = window[:, block.first : block.stop]
            tokens = stretch if block.index_BS is None else gather_tokens(window, block.index_BS)
            positions, mask = block.positions_BS, block.mask_BS
        elif old.mask_BS is not None:
            mask = torch.cat((old.mask_BS, old.mask_BS.new_ones(new.shape[:2])), dim=1)
        keeps_block = self.keeps_block and is_last
        read = self._reading(block, tokens.shape[1])
        with reading(read):
            outputs = self.base(
                **self._arguments(tokens, positions, mask, old, keeps_block, block.length if wanted else 1),
                output_hidden_states=output_hidden_states,
            )
        self.block = BlockCache(outputs.cache, mask) if keeps_block else None
        self._keep(block, window, read)
        if not wanted:
            return ()
        divergence_BS = read.divergence_BS
        if divergence_BS is None:
            divergence_BS = torch.zeros(outputs.logits.shape[:2], device=outputs.logits.device)
        parts = [outputs.logits, divergence_BS[..., None], *(outputs.hidden_states if output_hidden_states else ())]
        return [_front(part, block) for part in parts]

    def _reading(self, block: Block, width: int) -> BlockReading:
        projections = self.state.projections
        reads = block.holds or torch.is_grad_enabled()
        if reads and (torch.is_grad_enabled() or not projections):
            # An empty memory is read too where gradients may be asked for: none of its parameters goes without.
            projections = tuple(
                attention.project(memory)
                for attention, memory in zip(self.attentions.values(), self.state.memories, strict=True)
            )
            self.state = replace(self.state, projections=() if torch.is_grad_enabled() else projections)
        counted_BS = None
        if block.counted_BT is not None or width > block.length:
            counted_BS = torch.zeros(len(self.state.seen_B), width, dtype=torch.bool, device=block.places_BT.device)
            counted_BS[:, width - block.length :] = True if block.counted_BT is None else block.counted_BT
        layers = self.memory.memory_layers
        return BlockReading(
            key=self.model.hooks_key,
            attentions=self.attentions,
            projections=dict(zip(layers, projections, strict=True)) if reads else {},
            states=dict(zip(layers, self.state.memories, strict=True)),
            normalise=self.memory.memory_input_norm,
            reads=reads,
            counted_BS=counted_BS,
            last=block.length,
        )

    def _arguments(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        old: BlockCache | None,
        keeps_block: bool,
        logits_to_keep: int,
    ) -> dict[str, Any]:
        takes = self.model.base_takes
        if mask is not None:
            # A row without any token computes what is thrown away; it only has to be finite.
            mask = mask.clone()
            mask[:, -1] |= ~mask.any(dim=1)
            mask = mask.long()
        arguments: dict[str, Any] = {
            "input_ids" if tokens.dim() == 2 else "inputs_embeds": tokens,
            "attention_mask": mask,
            "use_cache": keeps_block or old is not None,
            "return_dict": True,
        }
        if old is not None:
            arguments["cache" if "cache" in takes else "past_key_values"] = old.cache
        if "position_ids" in takes:
            arguments["position_ids"] = positions.expand(len(tokens), -1)
        if "logits_to_keep" in takes:
            arguments["logits_to_keep"] = logits_to_keep
        return arguments

    def _keep(self, block: Block, window: Tensor, read: BlockReading) -> None:
        if missing := sorted(set(self.attentions) - set(read.inputs)):
            rule = "every layer with a memory must run in every call"
            raise ValueError(complaint(rule, f"layer {missing[0]} left out", "set the model's layerdrop to 0"))
        layers = self.memory.memory_layers
        inputs = tuple(
            append(old_BSE, _front(read.inputs[index], block), block.pending_move)
            for index, old_BSE in zip(layers, self.state.inputs, strict=True)
        )
        memories = tuple(read.states[index] for index in layers)
        self.state = replace(self.state, window=window, inputs=inputs, memories=memories)


def _front(part: Tensor, block: Block) -> Tensor:
    """Of ``[B, S, ...]`` the new tokens, each row's first ones first."""
    part = part[:, part.shape[1] - block.length :]
    return part if block.front_BT is None else gather_tokens(part, block.front_BT)


def _order(
    blocks: list[Block], counts: list[int], num_tokens: int, real_BT: Tensor | None, last: int
) -> tuple[Tensor | None, int]:
    """Where among the outputs of all blocks from the first that is needed on each wanted position's are; that block."""
    order_BT = token_order(blocks, counts, num_tokens)
    if order_BT is None and real_BT is None and last == num_tokens:
        return None, 0
    if order_BT is None:
        order_BT = torch.arange(num_tokens, device=blocks[0].places_BT.device).expand(len(counts), -1)
    if real_BT is not None:
        # A position's place among the row's real tokens; padding gets any.
        order_BT = order_BT.gather(1, (real_BT.cumsum(dim=1) - 1).clamp(min=0))
    order_BT = order_BT[:, num_tokens - last :]
    total = sum(block.length for block in blocks)
    wanted = order_BT if real_BT is None else torch.where(real_BT[:, num_tokens - last :], order_BT, total - 1)
    needed, first, base = int(wanted.min()), 0, 0
    while base + blocks[first].length <= needed:
        base += blocks[first].length
        first += 1
    return (order_BT - base).clamp(min=0), first


__all__ = ["SegmentLoop"]
