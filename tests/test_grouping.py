"""Which rows share a prompt: by tokens and positions alone, in any order, whatever the padding."""

import random

import pytest
import torch
from tiny import batch_b0, flat_rows, padded_batch, shuffled

from zorro_verl import grouping
from zorro_verl.grouping import Rows, find_prompt_groups, first_rows, prompt_fingerprints, ranges

A, B, C = [5, 6, 7], [5, 6, 8], [9]


def rows_of(*pairs):
    """``Rows`` of (prompt, response) lists of token ids."""
    return flat_rows([(torch.tensor(p), torch.tensor(r, dtype=torch.int64)) for p, r in pairs])


def groups_of(*prompts):
    """The groups of rows with these prompts; every response is another one, of another length."""
    pairs = [(p, list(range(1, 1 + i % 4))) for i, p in enumerate(prompts)]
    return find_prompt_groups(rows_of(*pairs)).tolist()


def expected_groups(keys):
    """Groups by first appearance, the plain way."""
    number = {}
    return [number.setdefault(key, len(number)) for key in keys]


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        pytest.param([A], [0], id="one-row"),
        pytest.param([A, A, A, B, B], [0, 0, 0, 1, 1], id="sorted"),
        pytest.param([A, B, A, B, A], [0, 1, 0, 1, 0], id="interleaved"),
        pytest.param([C, B, A, B, C, A], [0, 1, 2, 1, 0, 2], id="numbered-by-first-appearance"),
        pytest.param([B, C, A], [0, 1, 2], id="singletons"),
        pytest.param([[1, 2, 3], [1, 2, 4], [1, 2, 3]], [0, 1, 0], id="last-token-differs"),
        pytest.param([[1, 2, 3], [4, 2, 3], [1, 2, 3]], [0, 1, 0], id="first-token-differs"),
        pytest.param([[1, 2], [1, 2, 3], [1, 2], [1, 2, 3]], [0, 1, 0, 1], id="one-is-a-prefix-of-the-other"),
        pytest.param([[1, 2, 3], [3, 2, 1], [2, 1, 3]], [0, 1, 2], id="same-tokens-in-another-order"),
        pytest.param([[7], [7], [8], [7, 7]], [0, 0, 1, 2], id="one-token"),
        pytest.param([[0, 3, 0], [3, 0], [0, 3], [0, 3, 0]], [0, 1, 2, 0], id="pad-and-eos-id-inside"),
    ],
)
def test_groups_by_hand(prompts, groups):
    assert groups_of(*prompts) == groups


def test_prompt_and_response_bounds_matter():
    """The same row tokens, cut elsewhere, are other prompts; equal prompts share whatever their responses are."""
    rows = rows_of(([1, 2], [3, 4]), ([1, 2, 3], [4]), ([1, 2], []), ([1, 2], [9, 9, 9]))
    assert find_prompt_groups(rows).tolist() == [0, 1, 0, 0]


def test_same_tokens_at_other_positions_are_another_prompt():
    rows = rows_of((A, [1]), (A, [2]), (A, [1]))
    position_ids = torch.tensor([0, 1, 2, 3, 0, 1, 3, 4, 0, 1, 2, 9])
    moved = Rows(rows.tokens, position_ids, rows.cu_seqlens, rows.prompt_lens)
    assert find_prompt_groups(rows).tolist() == [0, 0, 0]
    assert find_prompt_groups(moved).tolist() == [0, 1, 0]  # the third row's response may lie anywhere


def test_positions_with_axes_count_on_every_axis():
    rows = rows_of((A, [1]), (A, [2]), (A, [3, 4]))
    axes = torch.stack([rows.position_ids, rows.position_ids.clone(), rows.position_ids * 2])
    assert find_prompt_groups(Rows(rows.tokens, axes, rows.cu_seqlens, rows.prompt_lens)).tolist() == [0, 0, 0]
    axes[2, 5] += 1  # the second token of the second row, on the last axis only
    assert find_prompt_groups(Rows(rows.tokens, axes, rows.cu_seqlens, rows.prompt_lens)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_any_row_order(seed):
    rows = shuffled(batch_b0(), seed)
    assert find_prompt_groups(flat_rows(rows)).tolist() == expected_groups(tuple(p.tolist()) for p, _ in rows)


def test_random_batches_against_plain_python():
    for seed in range(50):
        rng = random.Random(seed)
        prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 40))]
        assert groups_of(*prompts) == expected_groups(map(tuple, prompts))


def test_hash_collisions_are_told_apart(monkeypatch):
    """With one fingerprint for all prompts the token-by-token check alone must do the work."""
    prompts = [A, B, C, A, B, [5, 6], C, [5, 6], A]
    pairs = [(p, [1] * (i % 3)) for i, p in enumerate(prompts)]
    monkeypatch.setattr(grouping, "prompt_fingerprints", lambda rows: torch.zeros(rows.num_rows, dtype=torch.int64))
    assert find_prompt_groups(rows_of(*pairs)).tolist() == [0, 1, 2, 0, 1, 3, 2, 3, 0]


def test_some_hash_collisions_are_told_apart(monkeypatch):
    """Two buckets of several prompts each, so that rows that leave one group must not land in another."""
    prompts = [A, C, B, [1], A, [5, 6], [1], B, C]
    bucket = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0, 1])
    monkeypatch.setattr(grouping, "prompt_fingerprints", lambda rows: bucket)
    assert find_prompt_groups(rows_of(*((p, []) for p in prompts))).tolist() == [0, 1, 2, 3, 0, 4, 3, 2, 1]


def test_hash_collisions_of_positions_are_told_apart(monkeypatch):
    rows = rows_of((A, [1]), (A, [2]), (A, [3]))
    axes = torch.stack([rows.position_ids, rows.position_ids])
    axes[1, 4:7] += 3
    monkeypatch.setattr(grouping, "prompt_fingerprints", lambda rows: torch.zeros(rows.num_rows, dtype=torch.int64))
    assert find_prompt_groups(Rows(rows.tokens, axes, rows.cu_seqlens, rows.prompt_lens)).tolist() == [0, 1, 0]


def test_fingerprints_differ_where_prompts_do():
    prompts = [A, B, C, [5, 6], [6, 5, 7], [7, 6, 5], [5, 6, 7, 0], [0, 5, 6, 7]]
    fingerprints = prompt_fingerprints(rows_of(*((p, [1]) for p in prompts)))
    assert fingerprints.dtype == torch.int64
    assert len(set(fingerprints.tolist())) == len(prompts)
    again = prompt_fingerprints(rows_of(*((p, [2, 3]) for p in reversed(prompts))))
    assert again.flip(0).tolist() == fingerprints.tolist(), "a fingerprint is of the prompt alone"


def padded(rows, left=0, right=0, pad=0):
    """The padded batch of ``rows`` with extra columns at either end, as the arguments of ``from_padded``."""
    p_width = max(len(p) for p, _ in rows) + left
    r_width = max(1, max(len(r) for _, r in rows)) + right
    batch = padded_batch(rows, p_width, r_width, pad)
    return batch["input_ids"], batch["attention_mask"], batch["position_ids"], r_width


def assert_same_rows(a, b):
    for name in Rows.__slots__:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("pad", [0, 5, 60])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 3), (16, 5)])
def test_padding_carries_no_meaning(left, right, pad):
    rows = shuffled(batch_b0(), 2)
    assert_same_rows(Rows.from_padded(*padded(rows, left, right, pad)), flat_rows(rows))


def test_padding_may_lie_anywhere():
    """Right-padded and hole-ridden prompts and responses give the rows that their mask says."""
    ids = torch.tensor([[4, 5, 6, 0, 7, 8, 0], [0, 4, 5, 6, 0, 7, 8], [4, 0, 5, 6, 7, 0, 8], [4, 5, 0, 6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 0]])
    rows = Rows.from_padded(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), 3)
    assert rows.tokens.tolist() == [4, 5, 6, 7, 8] * 3 + [4, 5, 6]
    assert rows.position_ids.tolist() == [0, 1, 2, 3, 4] * 3 + [0, 1, 2]
    assert rows.prompt_lens.tolist() == [3, 3, 3, 3]
    assert rows.response_lens.tolist() == [2, 2, 2, 0]
    assert find_prompt_groups(rows).tolist() == [0, 0, 0, 0]


def test_pad_id_that_is_a_token_is_kept():
    """Only the mask says what padding is: id 0 is a token where the mask is 1."""
    rows = Rows.from_padded(
        torch.tensor([[0, 0, 3, 0, 9, 0], [0, 0, 3, 0, 0, 0]]),
        torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]),
        torch.zeros(2, 6, dtype=torch.int64),
        2,
    )
    assert rows.tokens.tolist() == [0, 3, 0, 9, 0, 3, 0, 0]
    assert rows.prompt_lens.tolist() == [3, 2]
    assert find_prompt_groups(rows).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_mask_of_any_dtype(dtype):
    rows = batch_b0()
    ids, mask, position_ids, width = padded(rows)
    assert_same_rows(Rows.from_padded(ids, mask.to(dtype), position_ids.int(), width), flat_rows(rows))


def test_positions_with_axes_are_unpadded_on_the_last():
    rows = batch_b0()
    ids, mask, position_ids, width = padded(rows, left=2)
    axes = torch.stack([position_ids, position_ids + 100], 1)
    got = Rows.from_padded(ids, mask, axes, width)
    plain = flat_rows(rows).position_ids
    assert torch.equal(got.position_ids, torch.stack([plain, plain + 100]))


IDS = torch.arange(1, 13).reshape(2, 6)
MASK = torch.ones(2, 6, dtype=torch.int64)
POSITIONS = torch.arange(6).expand(2, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"input_ids": IDS.float()}, "input_ids.*float32", id="float-ids"),
        pytest.param({"input_ids": IDS.int()}, "input_ids.*int32", id="int32-ids"),
        pytest.param({"input_ids": IDS[0]}, r"input_ids.*\(6,\)", id="flat-ids"),
        pytest.param({"attention_mask": MASK[:, 1:]}, r"attention_mask.*\(2, 6\).*\(2, 5\)", id="mask-width"),
        pytest.param({"attention_mask": MASK[:1]}, r"attention_mask.*\(1, 6\)", id="mask-rows"),
        pytest.param({"position_ids": POSITIONS[:, 1:]}, r"position_ids.*\(2, 5\)", id="positions-width"),
        pytest.param({"position_ids": POSITIONS[:1]}, r"position_ids.*\(1, 6\)", id="positions-rows"),
        pytest.param({"position_ids": POSITIONS.float()}, "position_ids.*float32", id="float-positions"),
        pytest.param({"position_ids": POSITIONS[None, None].expand(2, 1, 2, 6)}, "position_ids", id="positions-rank"),
        pytest.param({"response_length": 0}, r"responses.*1\.\.5.*got 0", id="no-response-columns"),
        pytest.param({"response_length": 6}, r"responses.*1\.\.5.*got 6", id="no-prompt-columns"),
        pytest.param({"response_length": -1}, "responses.*got -1", id="negative-width"),
        pytest.param({"attention_mask": MASK * 0}, r"input_ids.*row\(s\) \[0, 1\]", id="all-masked"),
        pytest.param(
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])},
            r"input_ids.*row\(s\) \[1\].*attention_mask",
            id="row-without-a-prompt",
        ),
    ],
)
def test_bad_batches_name_the_argument(arguments, message):
    good = {"input_ids": IDS, "attention_mask": MASK, "position_ids": POSITIONS, "response_length": 2}
    Rows.from_padded(**good)
    with pytest.raises(ValueError, match=message):
        Rows.from_padded(**good | arguments)


def test_flat_positions_are_refused_also_for_a_square_batch():
    ids = torch.ones(6, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="position_ids"):
        Rows.from_padded(ids, ids, torch.arange(6), 2)


def test_an_empty_batch_is_refused():
    empty = torch.zeros(0, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="input_ids.*empty batch"):
        Rows.from_padded(empty, empty, empty, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.ones(5)}, "tokens.*float32"),
        ({"position_ids": torch.arange(4)}, r"position_ids.*5 positions.*\(4,\)"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens.*5 tokens.*over 4"),
        ({"prompt_lens": torch.tensor([1, 1, 1])}, "cu_seqlens.*3 rows.*got 2 rows"),
        ({"prompt_lens": torch.tensor([1, 0])}, r"row\(s\) \[1\]"),
        ({"prompt_lens": torch.tensor([3, 1])}, r"row\(s\) \[0\]"),
    ],
)
def test_bad_flat_rows_name_the_argument(arguments, message):
    good = {
        "tokens": torch.arange(5),
        "position_ids": torch.arange(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "prompt_lens": torch.tensor([1, 2]),
    }
    assert Rows(**good).response_lens.tolist() == [1, 1]
    with pytest.raises(ValueError, match=message):
        Rows(**good | arguments)


def test_row_lengths():
    rows = flat_rows(batch_b0())
    assert rows.num_rows == 8
    assert rows.lens.tolist() == [11, 11, 11, 4, 8, 7, 12, 15]
    assert rows.response_lens.tolist() == [6, 6, 6, 3, 1, 0, 5, 8]


def test_first_rows_and_ranges():
    assert first_rows(torch.tensor([0, 1, 0, 2, 1])).tolist() == [0, 1, 3]
    assert ranges(torch.tensor([7, 0, 3]), torch.tensor([2, 0, 3])).tolist() == [7, 8, 3, 4, 5]


def test_ranges_stay_exact_beyond_32_bits():
    starts, lengths = torch.tensor([0, 2**31 - 2, 2**33]), torch.tensor([2, 4, 2])
    got = ranges(starts, lengths)
    assert got.dtype == torch.int64
    assert got.tolist() == [0, 1, *range(2**31 - 2, 2**31 + 2), 2**33, 2**33 + 1]
