"""veRL's keys of rows: what they say of a row, in the forms that veRL's own code gives them."""

import pytest
import torch

from zorro_verl.row_keys import is_padding, sample_of


@pytest.mark.parametrize(
    ("key", "sample"),
    [
        ("1893-3a_0_0", "1893-3a"),
        ("1893-3a_7_0", "1893-3a"),
        ("a_b_7_0", "a_b"),
        ("1893-3a_7_1", None),  # goes on from the rollout's own first turn
        ("1893-3a_7_10", None),
        ("plain", "plain"),
        (17, "17"),
        (None, None),
    ],
)
def test_samples(key, sample):
    assert sample_of(key) == sample
    assert not is_padding(key)


class Store:
    """The two calls of TransferQueue with which veRL pads a batch, over one row."""

    def kv_batch_get(self, keys, partition_id):
        return [{"prompts": torch.arange(5)} for _ in keys]

    def kv_batch_put(self, keys, partition_id, fields, tags):
        assert fields["prompts"].unbind()[0].tolist() == [0] * 127


def test_padding_as_verl_names_it(monkeypatch):
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo import padding_utils

    monkeypatch.setattr(padding_utils, "tq", Store())
    batch = KVBatchMeta(partition_id="train", keys=["1893-3a_0_0"], tags=[{}])
    added = padding_utils.upsample_batch_to_divisible_size(batch, 12, 0).keys[1:]
    assert len(added) == 11
    assert all(map(is_padding, added))


@pytest.mark.parametrize(
    "key", ["pad_0_0", "padding_0_0", f"pad{'0' * 32}", f"pad{'0' * 31}_0_0", f"pad{'g' * 32}_0_0"]
)
def test_a_prompt_whose_name_begins_like_padding(key):
    assert not is_padding(key)
