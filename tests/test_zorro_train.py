"""`ZoRRoTrain` and the batch statistics, against loops over rows and against the published samples as written."""

from __future__ import annotations

import copy
import pickle
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import batch_b0, padded_batch, shuffled, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from zorro_verl.flops import flop_bound_speedup
from zorro_verl.zorro_train import ZoRRoTrain, analyze_normal_batch_via_attention_mask

property_test = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def random_batch(seed):
    """Rows of few prompts in any order; the valid tokens stand anywhere in their part, pads are any token."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=g))  # noqa: E731
    width, response_length = draw(1, 5), draw(1, 4)
    prompts = [torch.randint(0, 4, (draw(1, width),), generator=g) for _ in range(draw(1, 3))]
    batch_size, columns = draw(1, 7), width + response_length
    input_ids = torch.randint(0, 4, (batch_size, columns), generator=g)
    attention_mask = torch.zeros_like(input_ids)
    for row in range(batch_size):
        prompt = prompts[draw(0, len(prompts) - 1)]
        where = torch.randperm(width, generator=g)[: len(prompt)].sort()[0]
        input_ids[row, where] = prompt
        attention_mask[row, where] = 1
        attention_mask[row, width + torch.randperm(response_length, generator=g)[: draw(0, response_length)]] = 1
    return input_ids, attention_mask, response_length


def valid_columns(attention_mask, row, low, high):
    return [column for column in range(low, high) if attention_mask[row, column]]


def naive_groups(input_ids, attention_mask, response_length, position_ids):
    width = input_ids.shape[1] - response_length
    groups = {}
    for row in range(len(input_ids)):
        columns = valid_columns(attention_mask, row, 0, width)
        groups.setdefault((*input_ids[row, columns].tolist(), *position_ids[row, columns].tolist()), []).append(row)
    return list(groups.values())


def naive_layout(attention_mask, response_length, groups, use_unpad):
    """The packed tokens as (row, column), and the packed token of each token of the batch, by loops."""
    batch_size, columns = attention_mask.shape
    width = columns - response_length
    packed, place = [], torch.full((batch_size, columns), -1)
    for group in groups:
        at = {}
        for row, low, high in [(group[0], 0, width), *((row, width, columns) for row in group)]:
            for column in range(low, high):
                if attention_mask[row, column] or not use_unpad:
                    at[row, column] = len(packed)
                    packed.append((row, column))
        for row in group:
            own, first = (valid_columns(attention_mask, r, 0, width) for r in (row, group[0]))
            for column, source in zip(own, first, strict=True):
                place[row, column] = at[group[0], source]
            for column in valid_columns(attention_mask, row, width, columns):
                place[row, column] = at[row, column]
    return packed, place


def deduplicated(input_ids, attention_mask, response_length, use_unpad, position_ids=None):
    groups, prompts = ZoRRoTrain.find_prompt_groups(input_ids, response_length, attention_mask, position_ids)
    return ZoRRoTrain.create_deduplicated_batch(
        input_ids, position_ids, response_length, groups, prompts, attention_mask, use_unpad
    )


# The published samples


@pytest.fixture
def four_rows():
    """Prompts [0, 1] and [2, 3] match; left-padded prompts, right-padded responses, one of them empty."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randint(1, 61, (5,), generator=g), torch.randint(1, 61, (3,), generator=g)
    rows = [(p, torch.randint(1, 61, (n,), generator=g)) for p, n in ((a, 4), (a, 2), (b, 0), (b, 3))]
    return SimpleNamespace(rows=rows, response_length=4, **padded_batch(rows, response_width=4))


def test_the_samples_of_the_core_algorithm_as_written(four_rows):
    input_ids, position_ids, response_length = four_rows.input_ids, four_rows.position_ids, four_rows.response_length
    model = tiny_model()

    prompt_groups, unique_prompts = ZoRRoTrain.find_prompt_groups(
        input_ids,  # [batch_size, seq_len]
        response_length,  # length of response portion
    )
    assert prompt_groups == [[0, 1], [2, 3]]
    assert torch.equal(unique_prompts, input_ids[[0, 2], :5])

    dedup_input_ids, dedup_position_ids, reconstruction_info = ZoRRoTrain.create_deduplicated_batch(
        input_ids,  # [batch_size, seq_len]
        position_ids,  # [batch_size, seq_len]
        response_length,
        prompt_groups,
        unique_prompts,
        attention_mask=None,  # Optional
        use_unpad=False,  # If True, remove padding
    )
    assert dedup_input_ids.shape == dedup_position_ids.shape == (1, 2 * 5 + 4 * 4)
    expected = [
        input_ids[0, :5],
        input_ids[0, 5:],
        input_ids[1, 5:],
        input_ids[2, :5],
        input_ids[2, 5:],
        input_ids[3, 5:],
    ]
    assert torch.equal(dedup_input_ids[0], torch.cat(expected))

    dedup_hidden = model.model(dedup_input_ids).last_hidden_state
    reconstructed_hidden = ZoRRoTrain.reconstruct_sequences(
        dedup_hidden,  # [1, total_tokens, hidden_dim]
        reconstruction_info,
    )
    assert reconstructed_hidden.shape == (4, 9, 32)
    assert torch.equal(reconstructed_hidden[1, :5], dedup_hidden[0, :5])
    assert torch.equal(reconstructed_hidden[3, 5:], dedup_hidden[0, -4:])

    # Standard QKV Optimization
    dedup_input_ids, _, reconstruction_info = ZoRRoTrain.create_deduplicated_batch(
        input_ids, position_ids, response_length, prompt_groups, unique_prompts
    )
    output = model(dedup_input_ids)
    reconstructed = ZoRRoTrain.reconstruct_sequences(output, reconstruction_info)
    assert reconstructed.shape == (4, 9, 61)
    assert torch.equal(reconstructed[2, :5], output.logits[0, 13:18])


@pytest.mark.parametrize("use_unpad", [False, True], ids=["padded-format", "unpacked-format"])
def test_the_samples_of_both_formats_as_written(four_rows, use_unpad):
    input_ids, position_ids, response_length = four_rows.input_ids, four_rows.position_ids, four_rows.response_length
    attention_mask = four_rows.attention_mask
    prompt_groups, unique_prompts = ZoRRoTrain.find_prompt_groups(input_ids, response_length)
    dedup_ids, dedup_pos, info = ZoRRoTrain.create_deduplicated_batch(
        input_ids,
        position_ids,
        response_length,
        prompt_groups,
        unique_prompts,
        attention_mask=attention_mask,
        use_unpad=use_unpad,
    )
    (a, r1), (_, r2), (b, r3), (_, r4) = four_rows.rows
    if use_unpad:
        assert torch.equal(dedup_ids[0], torch.cat([a, r1, r2, b, r3, r4]))
        assert dedup_pos[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 0, 1, 2, 3, 4, 5]
        assert info["cu_seqlens"].tolist() == [0, 5, 9, 11, 14, 14, 17]  # the padding boundaries
    else:
        assert dedup_ids.shape == dedup_pos.shape == (1, 26)
        assert info["cu_seqlens"].tolist() == [0, 5, 9, 13, 18, 22, 26]
    assert info["segment_row"].tolist() == [0, 0, 1, 2, 2, 3]
    assert info["segment_is_prompt"].tolist() == [True, False, False, True, False, False]
    again = ZoRRoTrain.reconstruct_sequences(dedup_ids, info)
    assert torch.equal(again, input_ids * attention_mask)


def test_the_sample_of_flash_attention_as_written():
    total_q, total_kv, heads, size = 5, 8, 2, 4
    attention_mask = torch.zeros(total_q, total_kv)  # sparse block-diagonal
    attention_mask[:2, :5] = torch.ones(2, 5).tril(3)
    attention_mask[2:, 5:] = torch.ones(3, 3).tril()
    q, k, v = (torch.randn(n, heads, size, dtype=torch.float64) for n in (total_q, total_kv, total_kv))

    def flash_attention_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        """What flash-attn's varlen kernel does with causal=True: each block causal from its bottom right corner."""
        out = []
        for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
            assert q1 - q0 <= max_seqlen_q
            assert k1 - k0 <= max_seqlen_k
            scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1])
            causal = torch.ones(q1 - q0, k1 - k0).tril(int((k1 - k0) - (q1 - q0))).bool()
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v[k0:k1]))
        return torch.cat(out)

    flash_params = ZoRRoTrain.attention_mask_to_flash_attn_params(
        attention_mask  # [total_q, total_kv] sparse block-diagonal
    )
    output = flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q=flash_params["cu_seqlens_q"],
        cu_seqlens_k=flash_params["cu_seqlens_k"],
        max_seqlen_q=flash_params["max_seqlen_q"],
        max_seqlen_k=flash_params["max_seqlen_k"],
    )
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(attention_mask == 0, -torch.inf)
    torch.testing.assert_close(output, torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), atol=1e-10, rtol=0)


# Groups


def test_groups_by_tokens_and_positions_wherever_the_padding_stands():
    input_ids = torch.tensor(
        [[0, 5, 6, 1, 1], [5, 6, 0, 2, 2], [9, 9, 9, 3, 3], [5, 9, 6, 4, 4], [0, 5, 6, 9, 9], [5, 6, 0, 7, 7]]
    )
    mask = torch.tensor(
        [[0, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    )
    groups, prompts = ZoRRoTrain.find_prompt_groups(input_ids, 2, attention_mask=mask)
    assert groups == [[0, 1, 3, 5], [2], [4]]
    assert torch.equal(prompts, input_ids[[0, 2, 4], :3])
    columns = [[0, 4], [1, 5], [2], [3]]
    assert ZoRRoTrain.find_prompt_groups(input_ids, 2)[0] == columns
    positions = torch.tensor(
        [[7, 0, 1, 2, 3], [0, 1, 7, 2, 3], [0, 1, 2, 3, 4], [0, 0, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    )
    assert ZoRRoTrain.find_prompt_groups(input_ids, 2, mask, positions)[0] == [[0, 1, 5], [2], [3], [4]]


def test_a_pad_id_inside_is_a_token():
    """Token 0 is the pad token: inside prompts and responses it is a token like others, where the mask says so."""
    rows = shuffled(batch_b0(), seed=1)
    batch = padded_batch(rows, pad=0)
    width = batch["responses"].shape[1]
    expected = {}
    for i, (prompt, _) in enumerate(rows):
        expected.setdefault(tuple(prompt.tolist()), []).append(i)
    assert any(0 in prompt for prompt in expected)
    groups, _ = ZoRRoTrain.find_prompt_groups(batch["input_ids"], width, batch["attention_mask"])
    assert groups == list(expected.values())
    ids, _, info = deduplicated(batch["input_ids"], batch["attention_mask"], width, use_unpad=True)
    assert ids.shape[1] == sum(map(len, expected)) + sum(len(r) for _, r in rows)
    values = ZoRRoTrain.reconstruct_sequences(ids, info)
    for row, (prompt, response) in zip(values, rows, strict=True):
        start = batch["input_ids"].shape[1] - width - len(prompt)
        assert torch.equal(row[start : start + len(prompt) + len(response)], torch.cat([prompt, response]))


# The packed row and the way back


@property_test
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([torch.int64, torch.bool, torch.float32]))
def test_any_batch_against_loops(seed, use_unpad, own_positions, dtype):
    input_ids, mask, response_length = random_batch(seed)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    position_ids = counted + 10 * (seed % 3) + torch.arange(len(mask))[:, None] % 2 if own_positions else None
    shown = counted if position_ids is None else position_ids
    groups, prompts = ZoRRoTrain.find_prompt_groups(input_ids, response_length, mask.to(dtype), position_ids)
    assert groups == naive_groups(input_ids, mask, response_length, shown)
    width = input_ids.shape[1] - response_length
    assert torch.equal(prompts, input_ids[[group[0] for group in groups], :width])

    # Any order of groups and of their rows is packed as given.
    groups = shuffled([shuffled(group, seed) for group in groups], seed)
    prompts = input_ids[[group[0] for group in groups], :width]
    ids, positions, info = ZoRRoTrain.create_deduplicated_batch(
        input_ids, position_ids, response_length, groups, prompts, mask.to(dtype), use_unpad
    )
    packed, place = naive_layout(mask, response_length, groups, use_unpad)
    assert ids.tolist() == [[int(input_ids[at]) for at in packed]]
    assert positions.tolist() == [[int(shown[at]) for at in packed]]
    assert torch.equal(info.reconstruct_index, place)
    assert [divmod(i, input_ids.shape[1]) for i in info.token_index.tolist()] == packed
    assert info.num_tokens == len(packed)
    assert info.prompt_groups == tuple(map(tuple, groups))
    assert (info.batch_size, info.seq_len) == tuple(input_ids.shape)
    assert (info.prompt_len, info.response_length, info.use_unpad) == (width, response_length, use_unpad)
    bounds = info.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(packed)
    for (low, high), row, is_prompt in zip(
        pairwise(bounds), info.segment_row.tolist(), info.segment_is_prompt.tolist(), strict=True
    ):
        assert all(r == row and (column < width) == is_prompt for r, column in packed[low:high])

    hidden = torch.randn(1, len(packed), 3, dtype=torch.float64, requires_grad=True)
    rebuilt = ZoRRoTrain.reconstruct_sequences(hidden, info)
    naive = torch.stack(
        [torch.stack([hidden[0, t] if t >= 0 else 0 * hidden[0, 0] for t in row]) for row in place.tolist()]
    )
    assert torch.equal(rebuilt, naive)
    assert not rebuilt[mask == 0].any()
    upstream = torch.randn_like(naive)
    expected, got = (torch.autograd.grad(value, hidden, upstream)[0] for value in (naive, rebuilt))
    torch.testing.assert_close(got, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("use_unpad", [False, True])
def test_a_model_of_single_tokens_cannot_tell_the_difference(use_unpad):
    """Values and parameter gradients of a network without attention are those of the padded batch."""
    rows = shuffled(batch_b0(), seed=2)
    batch = padded_batch(rows)
    mask = batch["attention_mask"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(61, 8), torch.nn.Linear(8, 8), torch.nn.Tanh()).double()
    ids, _, info = deduplicated(batch["input_ids"], mask, batch["responses"].shape[1], use_unpad)
    assert ids.shape[1] < mask.numel()
    weights = torch.randn(*mask.shape, 8, dtype=torch.float64)
    results = []
    for out in (model(batch["input_ids"]) * mask[..., None], ZoRRoTrain.reconstruct_sequences(model(ids), info)):
        results.append((out, torch.autograd.grad((out * weights).sum(), list(model.parameters()))))
    (expected, expected_grads), (got, got_grads) = results
    for row in range(len(rows)):
        torch.testing.assert_close(got[row], expected[row], atol=1e-10, rtol=0)
    for a, b in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_interleaved_groups():
    input_ids = torch.tensor([[1, 2, 10], [3, 4, 11], [1, 2, 12], [3, 4, 13]])
    ids, positions, info = deduplicated(input_ids, None, 1, use_unpad=False)
    assert info.prompt_groups == ((0, 2), (1, 3))
    assert ids.tolist() == [[1, 2, 10, 12, 3, 4, 11, 13]]
    assert positions.tolist() == [[0, 1, 2, 2, 0, 1, 2, 2]]
    assert torch.equal(ZoRRoTrain.reconstruct_sequences(ids, info), input_ids)


def test_the_gradient_of_a_prompt_is_the_sum_of_its_copies():
    input_ids = torch.tensor([[1, 10], [1, 11], [1, 12]])
    ids, _, info = deduplicated(input_ids, torch.tensor([[1, 1], [1, 0], [1, 1]]), 1, use_unpad=True)
    hidden = torch.zeros(1, ids.shape[1], dtype=torch.float64, requires_grad=True)
    upstream = torch.tensor([[1.0, 10], [2, 100], [4, 1000]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(ZoRRoTrain.reconstruct_sequences(hidden, info), hidden, upstream)
    assert gradient.tolist() == [[7, 10, 1000]]


def test_responses_of_nothing_but_padding():
    input_ids = torch.tensor([[1, 2, 0, 0], [1, 2, 0, 0], [3, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0]]).expand(3, -1)
    ids, positions, info = deduplicated(input_ids, mask, 2, use_unpad=True)
    assert (ids.tolist(), positions.tolist()) == ([[1, 2, 3, 2]], [[0, 1, 0, 1]])
    assert torch.equal(ZoRRoTrain.reconstruct_sequences(ids, info), input_ids)
    assert deduplicated(input_ids, mask, 2, use_unpad=False)[0].shape == (1, 2 * 2 + 3 * 2)


def test_a_models_output_is_taken_at_its_logits_else_its_last_hidden_state():
    ids, _, info = deduplicated(torch.tensor([[1, 2], [1, 3], [4, 5]]), None, 1, use_unpad=False)
    logits, hidden = torch.randn(1, ids.shape[1], 7), torch.randn(1, ids.shape[1], 3)
    expected = ZoRRoTrain.reconstruct_sequences(logits, info)
    assert torch.equal(ZoRRoTrain.reconstruct_sequences(CausalLMOutput(logits=logits), info), expected)
    got = ZoRRoTrain.reconstruct_sequences(BaseModelOutput(last_hidden_state=hidden), info)
    assert torch.equal(got, ZoRRoTrain.reconstruct_sequences(hidden, info))
    heads = torch.randn(1, ids.shape[1], 2, 4)
    assert ZoRRoTrain.reconstruct_sequences(heads, info).shape == (3, 2, 2, 4)


def test_the_info_is_a_mapping_that_never_changes():
    info = deduplicated(torch.tensor([[1, 2], [1, 3], [4, 5]]), None, 1, use_unpad=False)[2]
    assert dict(info)["reconstruct_index"] is info.reconstruct_index
    assert len(info) == len(list(info)) == len(dict(**info))
    assert info["batch_size"] == info.get("batch_size") == 3
    assert "num_tokens" in info
    assert info.get("nothing", 5) == 5
    for name in ("nothing", "__class__", 0):
        with pytest.raises(KeyError):
            info[name]
    with pytest.raises(AttributeError):
        info.batch_size = 4
    with pytest.raises(TypeError):
        info["batch_size"] = 4
    assert info == info
    assert info != copy.copy(info)
    assert len({info, info}) == 1
    for other in (copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert other.reconstruct_index is not info.reconstruct_index
        assert torch.equal(other.reconstruct_index, info.reconstruct_index)
        assert other.prompt_groups == info.prompt_groups
        hidden = torch.randn(1, info.num_tokens, 2)
        got = ZoRRoTrain.reconstruct_sequences(hidden, other)
        assert torch.equal(got, ZoRRoTrain.reconstruct_sequences(hidden, info))


# Masks for variable-length attention


def mask_of(blocks):
    """Blocks of (queries, keys) on the diagonal, each causal from its bottom right corner."""
    return torch.block_diag(*(torch.ones(n, m).tril(m - n) for n, m in blocks))


def rebuilt(params):
    bounds = zip(pairwise(params["cu_seqlens_q"].tolist()), pairwise(params["cu_seqlens_k"].tolist()), strict=True)
    return mask_of([(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in bounds])


blocks_of_any_size = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda b: (b[0], b[0] + b[1])), min_size=1, max_size=5
)


@property_test
@given(blocks_of_any_size, st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16]))
def test_blocks_come_back(blocks, dtype):
    params = ZoRRoTrain.attention_mask_to_flash_attn_params(mask_of(blocks).to(dtype))
    queries, keys = zip(*blocks, strict=True)
    assert params["cu_seqlens_q"].tolist() == [0, *accumulate(queries)]
    assert params["cu_seqlens_k"].tolist() == [0, *accumulate(keys)]
    assert (params["max_seqlen_q"], params["max_seqlen_k"]) == (max(queries), max(keys))
    assert params["cu_seqlens_q"].dtype == params["cu_seqlens_k"].dtype == torch.int32
    assert type(params["max_seqlen_q"]) is type(params["max_seqlen_k"]) is int


@property_test
@given(blocks_of_any_size)
def test_a_changed_mask_is_refused_or_described_as_it_is(blocks):
    def converted(mask):
        try:
            return ZoRRoTrain.attention_mask_to_flash_attn_params(mask)
        except ValueError as error:
            return str(error)

    mask, refused = mask_of(blocks), 0
    for at in range(mask.numel()):
        changed = mask.clone()
        changed.view(-1)[at] = 1 - changed.view(-1)[at]
        result = converted(changed)
        if isinstance(result, str):
            assert result.startswith("mask: ")
            refused += 1
        else:
            assert torch.equal(rebuilt(result), changed)
    assert refused > 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        pytest.param([[1, 0, 0], [0, 0, 0], [0, 0, 1]], "row 1 sees no key", id="a-query-that-sees-nothing"),
        pytest.param([[0, 0], [1, 0], [1, 1]], "row 0 sees no key .has its block more queries", id="more-queries"),
        pytest.param([[1, 0, 0], [1, 0, 1]], "row 1 sees keys that are not neighbours", id="a-gap"),
        pytest.param([[1, 0], [1, 0]], "row 1 neither sees one key more", id="not-causal"),
        pytest.param([[1, 1], [1, 1]], "row 1 neither sees one key more", id="a-full-rectangle"),
        pytest.param([[1, 0, 0], [1, 1, 1]], "row 1 neither sees one key more", id="a-step-of-two"),
        pytest.param([[1, 1, 0], [0, 1, 1]], "row 1 neither sees one key more", id="overlapping-blocks"),
        pytest.param([[0, 1], [1, 0]], "row 0 neither sees one key more", id="off-the-diagonal"),
        pytest.param([[1, 0, 0], [0, 0, 1]], "row 1 neither sees one key more", id="a-key-between-blocks"),
        pytest.param([[0, 1, 0], [0, 1, 1]], "row 0 neither sees one key more", id="a-first-key-nobody-sees"),
        pytest.param(
            [[1, 0, 0], [0, 1, 0]], "every key in a block, got 3 keys and blocks of 2", id="a-last-key-nobody-sees"
        ),
        pytest.param([[1, 0], [1, 2]], "expected 0 and 1 only, got 2", id="two"),
        pytest.param([[1, 0], [1, 0.5]], "expected 0 and 1 only, got 0.5", id="half"),
        pytest.param([[0, -torch.inf], [0, 0]], "expected 0 and 1 only, got -inf", id="an-additive-mask"),
        pytest.param([[1, 0], [1, torch.nan]], "expected 0 and 1 only, got nan", id="nan"),
        pytest.param([1, 1], r"expected a \(total_q, total_kv\) tensor", id="one-axis"),
        pytest.param([[[1]]], r"expected a \(total_q, total_kv\) tensor", id="three-axes"),
        pytest.param([[]], "both above 0", id="no-keys"),
    ],
)
def test_masks_that_no_varlen_kernel_can_express(mask, said):
    with pytest.raises(ValueError, match=f"^mask: .*{said}"):
        ZoRRoTrain.attention_mask_to_flash_attn_params(torch.tensor(mask))


def test_a_mask_is_converted_without_a_loop_over_its_rows():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **kwargs or {})

    counts = []
    for blocks in ([(2, 3)] * 2, [(2, 3)] * 1500, [(4000, 4000)]):
        mask = mask_of(blocks).bool()
        Count.calls = 0
        with Count():
            params = ZoRRoTrain.attention_mask_to_flash_attn_params(mask)
        assert len(params["cu_seqlens_q"]) == len(blocks) + 1
        counts.append(Count.calls)
    assert counts[0] == counts[1] == counts[2] < 100


# Statistics


def seed_batch():
    """One prompt of 15.9 Ki tokens and 16 responses of 0.4 to 1.0 Ki, padded to 16421 + 4096 columns."""
    lens = torch.tensor([410, 1024, *[634] * 13, 642])
    mask = torch.zeros(16, 16421 + 4096, dtype=torch.int64)
    mask[:, 16421 - 16282 : 16421] = 1
    for row, length in enumerate(lens.tolist()):
        mask[row, 16421 : 16421 + length] = 1
    prompt = torch.arange(16421) % 1000
    responses = torch.arange(16 * 4096).view(16, 4096)
    return torch.cat([prompt.expand(16, -1), responses], 1), mask


def test_the_published_line_comes_out(capsys):
    input_ids, attention_mask = seed_batch()
    stats = analyze_normal_batch_via_attention_mask(input_ids, attention_mask, padded_response_len=4096)
    assert capsys.readouterr().out == (
        "batch stats: prompt lens: 15.9Ki resp count=16/min=0.4Ki/mean=0.6Ki/max=1.0Ki non-pad-tokens=26.6K/82.5%\n"
    )
    total = 410 + 1024 + 13 * 634 + 642
    assert dict(stats) == {
        "prompt_lens": (16282,),
        "response_count": 16,
        "response_min": 410,
        "response_mean": total / 16,
        "response_max": 1024,
        "non_pad_tokens": 16282 + total,
        "non_pad_fraction": (16 * 16282 + total) / (16 * 20517),
        "token_ratio": (16 * 16282 + total) / (16282 + total),
        "unique_prompts": 1,
        "group_sizes": (16,),
    }
    with pytest.raises(TypeError):
        stats["response_count"] = 3


def test_statistics_of_several_prompts(capsys):
    """Prompts of 5, 1 and 7 tokens in groups of 3, 1 and 4, in any order, one response of them empty."""
    rows = shuffled(batch_b0(), seed=3)
    batch = padded_batch(rows, prompt_width=10, response_width=9)
    config = Qwen3Config(hidden_size=64, num_hidden_layers=2, vocab_size=1000)
    stats = analyze_normal_batch_via_attention_mask(batch["input_ids"], batch["attention_mask"].bool(), 9, config)
    groups = {}
    for prompt, response in rows:
        groups.setdefault(tuple(prompt.tolist()), []).append(len(response))
    lens = [len(response) for _, response in rows]
    assert stats["prompt_lens"] == tuple(map(len, groups))
    assert stats["group_sizes"] == tuple(map(len, groups.values()))
    assert stats["unique_prompts"] == 3
    assert (stats["response_count"], stats["response_min"], stats["response_max"]) == (8, 0, 8)
    assert stats["response_mean"] == sum(lens) / 8
    assert stats["non_pad_tokens"] == 13 + sum(lens)
    assert stats["token_ratio"] == (3 * 5 + 1 + 4 * 7 + sum(lens)) / (13 + sum(lens))
    assert stats["non_pad_fraction"] == (44 + sum(lens)) / (8 * 19)
    assert stats["flop_bound_speedup"] == flop_bound_speedup(config, [(len(p), r) for p, r in groups.items()])
    assert capsys.readouterr().out.startswith("batch stats: prompt lens: 0.0Ki,0.0Ki,0.0Ki resp count=8/min=0.0Ki/")


# Bad input

IDS = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6], [7, 2, 3, 4]])
GROUPS = [[0, 1], [2]]
PROMPTS = IDS[[0, 2], :2]
ONES = torch.ones_like(IDS)


def batch_errors():
    """Arguments that are wrong in one way, and what is said."""

    def case(name, said, **changed):
        return pytest.param(changed, said, id=name)

    yield case("ids-rank", r"input_ids: expected \(B, S\) int64 of at least 2 columns, got \(4,\)", input_ids=IDS[0])
    yield case("ids-dtype", "input_ids: expected .* got .*float32", input_ids=IDS.float())
    yield case("ids-type", "input_ids: expected .* got list", input_ids=IDS.tolist())
    yield case("no-rows", "input_ids: expected at least one row", input_ids=IDS[:0])
    for length in (0, 4, -1, 2.0, None):
        yield case(
            f"length-{length}", rf"response_length: expected an int in 1\.\.3.* got {length}", response_length=length
        )
    yield case("mask-shape", r"attention_mask: expected a tensor of shape \(3, 4\)", attention_mask=ONES[:, :3])
    yield case("mask-type", r"attention_mask: expected a tensor", attention_mask=ONES.tolist())
    yield case("mask-value", "attention_mask: expected 0 and 1 only, got 2", attention_mask=ONES * 2)
    yield case("mask-device", "attention_mask: expected a dense tensor, got a meta one", attention_mask=ONES.to("meta"))
    yield case(
        "no-prompt",
        r"input_ids: expected at least one prompt token in every row, got none in row\(s\) \[1\]",
        attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]),
    )
    yield case("positions-shape", "position_ids: expected a tensor of shape", position_ids=ONES[0])
    yield case("positions-dtype", "position_ids: expected integers, got torch.float32", position_ids=ONES.float())
    yield case("positions-bool", "position_ids: expected integers, got torch.bool", position_ids=ONES.bool())


GOOD = {"input_ids": IDS, "response_length": 2, "attention_mask": None, "position_ids": None}


@pytest.mark.parametrize(("changed", "said"), [*batch_errors()])
def test_bad_batches(changed, said):
    with pytest.raises(ValueError, match=said):
        ZoRRoTrain.find_prompt_groups(**GOOD | changed)
    with pytest.raises(ValueError, match=said):
        ZoRRoTrain.create_deduplicated_batch(**GOOD | changed, prompt_groups=GROUPS, unique_prompts=PROMPTS)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[0, 1]], r"each row of 0\.\.2 in exactly one group .* row\(s\) \[2\] missing"),
        ([], r"row\(s\) \[0, 1, 2\] missing"),
        ([[0, 1], [2, 0]], r"row\(s\) \[0\] missing, twice"),
        ([[0, 1], [3]], r"row\(s\) \[2, 3\] missing, twice or out of range"),
        ([[0, 1], [-1]], r"row\(s\) \[-1, 2\]"),
        ([[0, 1], [], [2]], "an empty group"),
        ([0, 1, 2], "lists of row indices"),
        ([[0.0, 1], [2]], "lists of row indices"),
        (None, "lists of row indices"),
    ],
)
def test_groups_that_are_no_partition(groups, said):
    with pytest.raises(ValueError, match=f"^prompt_groups: .*{said}"):
        ZoRRoTrain.create_deduplicated_batch(IDS, None, 2, groups, PROMPTS)


def test_groups_of_unlike_rows_are_refused():
    with pytest.raises(ValueError, match="^prompt_groups: .* row 2 with other tokens than row 0, .* attention_mask="):
        ZoRRoTrain.create_deduplicated_batch(IDS, None, 2, [[0, 2], [1]], IDS[[0, 1], :2])


def test_groups_made_without_the_mask_or_the_positions_are_refused():
    ids = torch.tensor([[1, 1, 5], [1, 1, 6], [1, 2, 7]])
    groups, prompts = ZoRRoTrain.find_prompt_groups(ids, 1)
    assert groups == [[0, 1], [2]]
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]])
    with pytest.raises(
        ValueError, match="^prompt_groups: .* row 1 with another prompt length than row 0.* attention_mask="
    ):
        ZoRRoTrain.create_deduplicated_batch(ids, None, 1, groups, prompts, mask)
    positions = torch.tensor([[0, 1, 2], [0, 2, 3], [0, 1, 2]])
    with pytest.raises(ValueError, match="^prompt_groups: .* row 1 with other positions than row 0.* position_ids="):
        ZoRRoTrain.create_deduplicated_batch(ids, positions, 1, groups, prompts)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (PROMPTS[:1], r"expected a tensor of shape \(2, 2\)"),
        (IDS[[0, 2], :3], r"expected a tensor of shape \(2, 2\)"),
        (PROMPTS.tolist(), r"expected a tensor, got list"),
        (PROMPTS.int(), "expected an int64 tensor"),
        (PROMPTS.flip(0), "got another prompt for group 0"),
        (IDS[[0, 0], :2], "got another prompt for group 1"),
    ],
)
def test_prompts_of_other_groups(prompts, said):
    with pytest.raises(ValueError, match=f"^unique_prompts: .*{said}"):
        ZoRRoTrain.create_deduplicated_batch(IDS, None, 2, GROUPS, prompts)


def test_values_that_do_not_fit_the_info():
    info = ZoRRoTrain.create_deduplicated_batch(IDS, None, 2, GROUPS, PROMPTS)[2]
    assert info.num_tokens == 10
    for hidden in (
        torch.ones(1, 9, 2),
        torch.ones(10, 2),
        torch.ones(2, 10, 2),
        torch.ones(10),
        SimpleNamespace(),
        None,
    ):
        with pytest.raises(ValueError, match=r"^dedup_hidden: expected \(1, 10, \.\.\.\)"):
            ZoRRoTrain.reconstruct_sequences(hidden, info)
    with pytest.raises(ValueError, match="^dedup_hidden: .* on cpu, got .* on meta"):
        ZoRRoTrain.reconstruct_sequences(torch.ones(1, 10, 2, device="meta"), info)
    with pytest.raises(ValueError, match="^info: expected the ReconstructionInfo .* got dict"):
        ZoRRoTrain.reconstruct_sequences(torch.ones(1, 10, 2), dict(info))


@pytest.mark.parametrize("length", [0, 4, 9])
def test_statistics_of_responses_that_leave_no_prompt(length):
    with pytest.raises(ValueError, match=r"^padded_response_len: expected an int in 1\.\.3"):
        analyze_normal_batch_via_attention_mask(IDS, ONES, length)


def test_statistics_need_a_mask_and_sizes(capsys):
    with pytest.raises(ValueError, match=r"^attention_mask: expected a tensor of shape \(3, 4\)"):
        analyze_normal_batch_via_attention_mask(IDS, ONES[:2], 2)
    with pytest.raises(ValueError, match="^config: expected a model config with hidden_size above 0"):
        analyze_normal_batch_via_attention_mask(IDS, ONES, 2, config=SimpleNamespace())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("use_unpad", [False, True])
def test_a_plain_model_under_the_visibility_of_the_info_gives_the_rows(use_unpad):
    rows = shuffled(batch_b0(), 1)
    batch, model = padded_batch(rows), tiny_model()
    ids, positions, info = deduplicated(
        batch["input_ids"], batch["attention_mask"], batch["responses"].shape[1], use_unpad, batch["position_ids"]
    )
    output = model(ids, attention_mask=info.visible()[None, None], position_ids=positions, use_cache=False)
    logits = ZoRRoTrain.reconstruct_sequences(output, info)
    for row, mask, got in zip(rows, batch["attention_mask"].bool(), logits, strict=True):
        expected = model(torch.cat(row)[None], use_cache=False).logits[0]
        torch.testing.assert_close(got[mask], expected, atol=5e-6, rtol=0)


def test_the_info_says_what_it_is():
    batch = padded_batch(shuffled(batch_b0(), 1))
    info = deduplicated(batch["input_ids"], batch["attention_mask"], batch["responses"].shape[1], True)[2]
    assert repr(info) == "ReconstructionInfo(8 rows of 15 columns, 3 prompts, 48 packed)"
