"""``shuffle=True`` of actor or critic: verl draws each rank's mini-batches row by row; here they are drawn by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import Sampler
from verl.single_controller.base.decorator import MAGIC_ATTR, register
from verl.utils import tensordict_utils as tu

from zorro_verl.batching import place_groups
from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.options import ZorroOptions
from zorro_verl.verl_rows import rows_from_verl
from zorro_verl.wrapping import wrap_once


class GroupShuffle(Sampler[int]):
    """Row indices for an epoch, another order each time it is iterated: groups are drawn, and stay in one mini-batch.

    Mini-batches are equal slices of what comes out. Where they can't be made of whole groups, as few groups are cut as
    `zorro_verl.batching.place_groups` finds.

    Args:
        rows: one rank's rows.
        num_mini_batches: into which an epoch is cut; divides the number of rows.
        seed: of the first epoch and all that follow.
        groups: `find_prompt_groups` of the rows, where they are at hand.
    """

    def __init__(self, rows: Rows, num_mini_batches: int, seed: int, groups: torch.Tensor | None = None):
        self.groups = find_prompt_groups(rows) if groups is None else groups
        self.prompt_lens, self.response_lens = rows.prompt_lens, rows.response_lens
        self.num_mini_batches = num_mini_batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.groups.numel()

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(int(self.groups.max()) + 1, generator=self.generator)[self.groups]
        rows = drawn.argsort(stable=True)
        columns = (drawn[rows].tolist(), self.prompt_lens[rows].tolist(), self.response_lens[rows].tolist())
        order = rows[place_groups(*columns, 1, self.num_mini_batches)]
        # Which sizes of groups meet in which mini-batch is no matter of chance, but their order is.
        mini_batches = torch.randperm(self.num_mini_batches, generator=self.generator)
        yield from order.view(self.num_mini_batches, -1)[mini_batches].flatten().tolist()


def wrap_training_worker(module: ModuleType) -> None:
    """Wrap ``TrainingWorker`` of ``verl.workers.engine_workers``. A second call changes nothing."""
    wrap_once(module.TrainingWorker, "train_mini_batch", _shuffling_groups)


def _shuffling_groups(original: Callable) -> Callable:
    # Registered again: verl's decorator turns what came over the wire into the rows that are looked at here.
    @register(**getattr(original, MAGIC_ATTR))
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        options = tu.get_non_tensor_data(data, "dataloader_kwargs", default={})
        if options.get("shuffle", False) and isinstance(getattr(self.engine, "options", None), ZorroOptions):
            sampler = _sampler(self.engine, data)
            if sampler is not None:
                options = {key: value for key, value in options.items() if key != "shuffle"} | {"sampler": sampler}
                tu.assign_non_tensor_data(data, "dataloader_kwargs", options)
        return original(self, data)

    return train_mini_batch


def _sampler(engine: Any, data: TensorDict) -> GroupShuffle | None:
    """What verl's loader draws this rank's rows with; None for rows that can't be read or don't divide."""
    mini_batch_size = tu.get_non_tensor_data(data, "mini_batch_size", default=None)
    num_mini_batches = tu.get_non_tensor_data(data, "num_mini_batch", default=None)
    if mini_batch_size is not None:
        num_mini_batches = len(data) * engine.get_data_parallel_size() // mini_batch_size
    if not num_mini_batches or len(data) % num_mini_batches:
        return None  # verl raises
    tu.maybe_fix_3d_position_ids(data)
    keys = [key for key in ("input_ids", "position_ids", "responses", "attention_mask") if key in data.keys()]
    try:
        rows, _ = rows_from_verl(data.select(*keys))
    except ValueError:
        return None  # the engine raises the same on all ranks together: raised here, the others would wait for this one
    seed = tu.get_non_tensor_data(data, "seed", default=42) + engine.get_data_parallel_rank()
    return GroupShuffle(rows, num_mini_batches, seed)
