"""More or fewer positions than a checkpoint has: the rows that both have stay what they are, bit for bit."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from hf_longmem._errors import complaint
from hf_longmem.layers.positions import AxialPositionEmbeddings
from hf_longmem.models.loading import HUB_ARGUMENTS, CheckedLoading
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig


class ResizablePositions(CheckedLoading):
    """A model whose position tables are cut or grown, on request or to fit the config it is loaded with."""

    config: ReformerLSHConfig

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any = None, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Load as transformers does; the config may have another number of positions than the checkpoint.

        Raises:
            ValueError: an axis other than the first differs, so that no row could stay what it is; or weights that are
                not finite.
            OSError: a damaged file.
        """
        load = super().from_pretrained
        source = pretrained_model_name_or_path
        if source is None:
            return load(None, *args, config=config, **kwargs)
        hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        saved, _ = ReformerLSHConfig.get_config_dict(source, **hub_arguments)
        if not isinstance(config, PreTrainedConfig):
            # The dtype is for the weights: a config would take "auto" for the name of one.
            dtypes = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
            config, kwargs = ReformerLSHConfig.from_pretrained(config or source, return_unused_kwargs=True, **kwargs)
            kwargs |= hub_arguments | dtypes
        if saved.get("model_type") != config.model_type or not _can_be_resized(saved, config.to_dict()):
            return load(source, *args, config=config, **kwargs)
        like_saved = copy.deepcopy(config)
        like_saved.axial_pos_shape = saved["axial_pos_shape"]
        like_saved.max_position_embeddings = saved["max_position_embeddings"]
        loaded = load(source, *args, config=like_saved, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if (
            config.position_embedding_type == "axial"
            and list(config.axial_pos_shape[1:]) != saved["axial_pos_shape"][1:]
        ):
            rule = f"only the first axis of axial_pos_shape may differ from the checkpoint's {saved['axial_pos_shape']}"
            raise ValueError(complaint(rule, list(config.axial_pos_shape), "change that one: it holds the later rows"))
        model.resize_position_embeddings(config.num_positions)
        model.config.max_position_embeddings = config.max_position_embeddings
        return loaded

    def get_position_embeddings(self) -> Any:
        """Return the module that holds the position tables; rotary models have none."""
        return self.base_model.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Keep the first rows of the position table and cut or initialise the others; rotary models have no table.

        Args:
            new_num_position_embeddings: positions to have; axial tables get as many as fill the first axis.
        """
        if new_num_position_embeddings < 1:
            raise ValueError(complaint("a model must have at least 1 position", new_num_position_embeddings, "use 1"))
        positions = self.base_model.position_embeddings
        if isinstance(positions, AxialPositionEmbeddings):
            first, *others = self.config.axial_pos_shape or ()
            first = -(-new_num_position_embeddings // math.prod(others))
            positions.weights[0] = nn.Parameter(
                _with_rows(positions.weights[0], first, self.config.axial_norm_std), positions.weights[0].requires_grad
            )
            self.config.axial_pos_shape = (first, *others)
        elif isinstance(positions, nn.Embedding):
            rows = _with_rows(positions.weight, new_num_position_embeddings, self.config.initializer_range)
            positions.weight = nn.Parameter(rows, positions.weight.requires_grad)
            positions.num_embeddings = new_num_position_embeddings
        self.config.max_position_embeddings = new_num_position_embeddings


def _can_be_resized(saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Tell whether both have a table of one kind, of different sizes; nothing of another kind's could be kept."""
    had, wants = _positions(saved), _positions(wanted)
    return had is not None and wants is not None and had[0] == wants[0] and had != wants


def _positions(config: dict[str, Any]) -> tuple[str, Sequence[int]] | None:
    """Kind and size of the position table, None if there is none."""
    kind = config["position_embedding_type"]
    sizes = {"axial": config["axial_pos_shape"], "learned": [config["max_position_embeddings"]], "rotary": None}[kind]
    return None if sizes is None else (kind, list(sizes))


@torch.no_grad()
def _with_rows(table: Tensor, num_rows: int, std: float) -> Tensor:
    rows = table.new_empty(num_rows, *table.shape[1:]).normal_(std=std)
    kept = min(num_rows, table.shape[0])
    rows[:kept] = table[:kept]
    return rows
