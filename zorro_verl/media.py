"""Images and videos that rows bring beside their tokens: checked, told apart, and as the model takes them.

A row with media goes through the model whole. Its tokens hold one placeholder for each feature that the vision tower
makes of its patches, and the model writes features over placeholders in their order in the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zorro_verl.grouping import Rows, exclusive_cumsum, mix

# By kind: what a row brings, the patches and the grid of each image (frames, height, width, in patches).
INPUTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
MODEL_INPUTS = tuple(name for names in INPUTS.values() for name in names)
# What processors add for the positions and for verl's own count of work; positions come with the batch.
_NOT_FOR_THE_MODEL = ("images_seqlens", "mm_token_type_ids", "second_per_grid_ts", "video_metadata")


class Vision(NamedTuple):
    """What a model with a vision tower puts features in place of.

    Attributes:
        placeholders: the token id that stands for one feature, by kind.
        merge: patches of a feature along each side: height and width of a grid are multiples of it.
        patch_size: numbers in a patch.
    """

    placeholders: Mapping[str, int]
    merge: int
    patch_size: int

    @property
    def patches(self) -> int:
        """Patches that make one feature."""
        return self.merge**2

    @classmethod
    def of(cls, config: Any) -> Vision | None:
        """From a transformers config; None for a text model."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return None
        tokens = {kind: getattr(config, f"{kind}_token_id") for kind in INPUTS}
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(tokens, vision.spatial_merge_size, size)


_TEXT = Vision({}, 1, 0)  # of a model without a vision tower, whose rows bring no media


class Media:
    """The media of a batch's rows.

    Args:
        rows: what each row brings, a mapping from names to tensors, or None.
        vision: of the model; None for a text model.

    Attributes:
        rows: what the model takes of it, an empty dict for a row without media.
        present: ``(B,)`` bool on the host, the rows with media.

    Raises:
        ValueError: media for a text model, an input that is not known, or patches that don't fill their grids.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any] | None], vision: Vision | None):
        self._vision = vision or _TEXT
        self.rows = [_known(row, item) for row, item in enumerate(rows)]
        if vision is not None:
            self._check_grids(vision)
        self.present = torch.tensor([bool(item) for item in self.rows], dtype=torch.bool)
        if vision is None and bool(self.present.any()):
            raise ValueError(
                "multi_modal_inputs: expected text-only rows for this model type, got images or other media; "
                "use a model with a vision tower, or in veRL actor_rollout_ref.actor.strategy=fsdp2"
            )

    def _check_grids(self, vision: Vision) -> None:
        """What the vision tower would fail on, on this rank alone."""
        for row, item in enumerate(self.rows):
            for patches_name, grid_name in INPUTS.values():
                if patches_name not in item:
                    continue
                patches, grid = item[patches_name], item[grid_name]
                if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
                    raise ValueError(
                        f"{grid_name}: expected (images, 3) integers in row {row}, got {tuple(grid.shape)} {grid.dtype}"
                    )
                if bool((grid < 1).any()) or bool((grid[:, 1:] % vision.merge).any()):
                    raise ValueError(
                        f"{grid_name}: expected frames, height and width of at least 1, height and width as multiples "
                        f"of {vision.merge}, got {grid.tolist()} in row {row}"
                    )
                expected = (int(grid.prod(-1).sum()), vision.patch_size)
                if tuple(patches.shape) != expected or not patches.is_floating_point():
                    raise ValueError(
                        f"{patches_name}: expected {expected} floats in row {row}, as {grid_name} says, "
                        f"got {tuple(patches.shape)} {patches.dtype}"
                    )

    @property
    def kinds(self) -> list[str]:
        """Of `INPUTS`, those that some row brings; the vision tower runs once for each."""
        return [kind for kind, (patches, _) in INPUTS.items() if any(patches in item for item in self.rows)]

    def check(self, rows: Rows) -> None:
        """Raise a ValueError for a row whose placeholder tokens are not as many as its features.

        A row without media may hold placeholders by chance, but not beside one with media: the model can't tell which
        of them are to be written over.
        """
        for kind in self.kinds:
            expected = torch.tensor([self._num_patches(kind, item) // self._vision.patches for item in self.rows])
            found = self._placeholders(kind, rows, rows.cu_seqlens[1:])
            bad = (expected != found).nonzero().flatten().tolist()
            if bad:
                raise ValueError(
                    f"input_ids: expected {expected[bad[0]]} placeholder tokens ({self._vision.placeholders[kind]}) in "
                    f"row {bad[0]}, as many as features of its {kind}s, got {found[bad[0]]}; drop the row, or see that "
                    "responses hold no placeholders"
                )

    def fingerprints(self, rows: Rows) -> Tensor:
        """``(B,)`` int64 on the host: a hash of the media in each row's prompt, 0 where there are none."""
        total = torch.zeros(rows.num_rows, dtype=torch.int64)
        for salt, kind in enumerate(self.kinds, start=1):
            features = self._placeholders(kind, rows, rows.cu_seqlens[:-1] + rows.prompt_lens)
            for row in features.nonzero().flatten().tolist():
                if INPUTS[kind][0] in self.rows[row]:
                    total[row] ^= self._hash(kind, self.rows[row], int(features[row]) * self._vision.patches, salt)
        return total

    def model_inputs(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs of all rows in one, row after row; of a batch without media none.

        That is their order in the packed row, where rows that share with nobody stand in their own order.
        """
        names = [name for kind in self.kinds for name in INPUTS[kind]]
        return {name: torch.cat([item[name].to(device) for item in self.rows if name in item]) for name in names}

    @staticmethod
    def _num_patches(kind: str, item: Mapping[str, Tensor]) -> int:
        patches = INPUTS[kind][0]
        return item[patches].shape[0] if patches in item else 0

    def _placeholders(self, kind: str, rows: Rows, ends: Tensor) -> Tensor:
        """``(B,)`` on the host: placeholders in each row before ``ends``."""
        count = exclusive_cumsum(rows.tokens.eq(self._vision.placeholders[kind]).long()).cpu()
        return count[ends] - count[rows.cu_seqlens[:-1]]

    @staticmethod
    def _hash(kind: str, item: Mapping[str, Tensor], num_patches: int, salt: int) -> Tensor:
        patches, grid = (item[name] for name in INPUTS[kind])
        in_prompt = grid.prod(-1).cumsum(0) <= num_patches
        total = torch.tensor(salt)
        for values in (patches[:num_patches], grid[in_prompt]):
            words = values.detach().double().flatten().view(torch.int64).cpu()
            total = mix(total + mix(words ^ mix(torch.arange(words.numel()))).sum())
        return total


def _known(row: int, item: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """What the model takes of what a row brings."""
    if item is not None and not isinstance(item, Mapping):
        raise ValueError(f"multi_modal_inputs: expected a mapping or None for each row, got {type(item).__name__}")
    given = {name: value for name, value in (item or {}).items() if value is not None}
    unknown = sorted(map(str, given.keys() - {*MODEL_INPUTS, *_NOT_FOR_THE_MODEL}))
    if unknown:
        raise ValueError(
            f"multi_modal_inputs: expected inputs among {MODEL_INPUTS}, got {unknown} in row {row}; in veRL use "
            "actor_rollout_ref.actor.strategy=fsdp2"
        )
    known = {name: given[name] for name in MODEL_INPUTS if name in given}
    for patches, grid in INPUTS.values():
        if (patches in known) != (grid in known):
            raise ValueError(f"multi_modal_inputs: expected {patches} and {grid} together, got one in row {row}")
        if patches in known and not all(isinstance(known[name], Tensor) for name in (patches, grid)):
            kinds = " and ".join(type(known[name]).__name__ for name in (patches, grid))
            raise ValueError(f"multi_modal_inputs: expected {patches} and {grid} as tensors, got {kinds} in row {row}")
        if patches in known and not known[patches].numel() and not known[grid].numel():
            del known[patches], known[grid]  # a row without an image
    return known
