"""The code samples that describe the package, run as they are written, and their results checked.

Only the names of a checkpoint and a device are replaced by what a test has at hand.
"""

import re

import pytest
import torch
from tiny import batch_b0, padded_batch, per_row, shuffled, tiny_model

ROWS = shuffled(batch_b0(), 1)
BATCH = padded_batch(ROWS)
MASK = BATCH["attention_mask"].bool()
WIDTH = BATCH["responses"].shape[1]
FLOAT32 = 2e-5

GROUPS = """
from zorro_verl.zorro_train import ZoRRoTrain
prompt_groups, unique_prompts = ZoRRoTrain.find_prompt_groups(
    input_ids,      # [batch_size, seq_len]
    response_length # length of response portion
)
"""
STANDARD = """
# Compute Q, K, V on deduplicated batch
dedup_input_ids, _, reconstruction_info = ZoRRoTrain.create_deduplicated_batch(
    input_ids, position_ids, response_length, prompt_groups, unique_prompts
)
# Forward through model
output = model(dedup_input_ids)
# Reconstruct to original batch shape
reconstructed = ZoRRoTrain.reconstruct_sequences(output, reconstruction_info)
"""
HIDDEN = """
reconstructed_hidden = ZoRRoTrain.reconstruct_sequences(
    dedup_hidden,         # [1, total_tokens, hidden_dim]
    reconstruction_info
)
"""
PADDED = """
dedup_ids, dedup_pos, info = ZoRRoTrain.create_deduplicated_batch(
    input_ids,
    position_ids,
    response_length,
    prompt_groups,
    unique_prompts,
    attention_mask=attention_mask,  # Include mask
    use_unpad=False
)
"""
UNPACKED = PADDED.replace("use_unpad=False", "use_unpad=True  # Enable unpacking")
PRODUCTION = """
from zorro_verl import Qwen3ModelOncePatcher

patcher = Qwen3ModelOncePatcher(
    model,
    use_split_attention=True,
    attn_implementation="eager"  # or "flash_attention_2"
)
patcher.patch(response_len=512, rollout_n=10, temperature=1.0)

# Now all forward passes use deduplication internally
output = model(input_ids)
"""
REFERENCE = """
from zorro_verl.qwen_model_patcher import Qwen3ModelPatcher

with Qwen3ModelPatcher(model, use_split_attention=True):
    output = model(input_ids)  # Runs deduplicated
# Patching automatically removed
"""
LAYER = """
from zorro_verl.qwen_attention_patcher import QwenAttentionPatcher

patcher = QwenAttentionPatcher(
    attention_layer,
    use_split_attention=True
)
patcher.patch()
"""
FLASH = """
flash_params = ZoRRoTrain.attention_mask_to_flash_attn_params(
    attention_mask  # [total_q, total_kv] sparse block-diagonal
)

# Now use in Flash Attention kernels
output = flash_attention_forward(
    q, k, v,
    cu_seqlens_q=flash_params["cu_seqlens_q"],
    cu_seqlens_k=flash_params["cu_seqlens_k"],
    max_seqlen_q=flash_params["max_seqlen_q"],
    max_seqlen_k=flash_params["max_seqlen_k"]
)
"""
ACTOR = """
from zorro_verl.actor import DeduplicatedActor

# Initialize
actor = DeduplicatedActor(
    model_name_or_path="Qwen/Qwen3-0.6B",
    device="cuda",
    logits_optimization="none",     # "none" | "compute" | "memory"
    use_split_attention=True,
    attn_implementation="eager",    # or "flash_attention_2"
)

# Forward pass (auto-deduplicated)
output = actor.forward(
    batch,
    temperature=1.0,
    calculate_entropy=True
)
log_probs = output.logprobs    # [num_valid_response_tokens]
entropy = output.entropy        # [num_valid_response_tokens]

# Training step
actor.model.train()
metrics = actor.compute_policy_loss_and_backward(
    batch,
    temperature=1.0,
    gradient_accumulation=1
)
print(f"Policy loss: {metrics['actor/policy_loss']:.4f}")
"""
ANALYSIS = """
from zorro_verl.zorro_train import analyze_normal_batch_via_attention_mask

analyze_normal_batch_via_attention_mask(
    input_ids,
    attention_mask,
    padded_response_len=4096
)
"""


def run(*samples, **names):
    for sample in samples:
        exec(sample, names)
    return names


def tensors(**others):
    names = {name: BATCH[name] for name in ("input_ids", "position_ids")}
    return names | {"response_length": WIDTH} | others


def row_logits(model):
    return [model(torch.cat(row)[None], use_cache=False).logits[0] for row in ROWS]


def test_groups_and_the_way_back():
    """Without a mask: columns as they stand, so only prompts of one width count as equal."""
    names = run(GROUPS, STANDARD, **tensors(model=tiny_model(dtype=torch.float32)))
    assert sorted(row for group in names["prompt_groups"] for row in group) == list(range(len(ROWS)))
    assert names["unique_prompts"].shape == (len(names["prompt_groups"]), BATCH["input_ids"].shape[1] - WIDTH)
    assert names["reconstructed"].shape == (*BATCH["input_ids"].shape, 61)
    packed = names["output"].logits[0][names["reconstruction_info"].reconstruct_index]
    assert torch.equal(names["reconstructed"], packed)
    hidden = torch.nn.functional.one_hot(names["dedup_input_ids"], 61).float()
    names = run(HIDDEN, **names | {"dedup_hidden": hidden})
    assert torch.equal(names["reconstructed_hidden"].argmax(-1), BATCH["input_ids"])


@pytest.mark.parametrize(("sample", "columns"), [(PADDED, 3 * 7 + 8 * 8), (UNPACKED, 48)])
def test_padded_and_unpacked(sample, columns):
    names = tensors(attention_mask=BATCH["attention_mask"])
    names = run(GROUPS.replace("portion\n", "portion\n,attention_mask=attention_mask"), sample, **names)
    assert names["dedup_ids"].shape == names["dedup_pos"].shape == (1, columns)
    for packed, padded in (("dedup_ids", "input_ids"), ("dedup_pos", "position_ids")):
        restored = names["ZoRRoTrain"].reconstruct_sequences(names[packed], names["info"])
        assert torch.equal(restored, BATCH[padded] * BATCH["attention_mask"])


def full_rows():
    """Rows without padding, as a call without a mask takes them: two prompts, three responses each."""
    g = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, 61, (2, 9), generator=g)[[0, 1, 0, 1, 0, 1]]
    return torch.cat([prompts, torch.randint(1, 61, (6, 4), generator=g)], 1)


@pytest.mark.parametrize("sample", [PRODUCTION, REFERENCE])
def test_patched_models(sample):
    model, input_ids = tiny_model(dtype=torch.float32), full_rows()
    expected = tiny_model(dtype=torch.float32)(input_ids).logits
    names = run(sample, model=model, input_ids=input_ids)
    torch.testing.assert_close(names["output"].logits, expected, atol=FLOAT32, rtol=0)
    if sample == PRODUCTION:
        assert names["patcher"].stats["tokens_packed"] == 2 * 9 + 6 * 4
        names["patcher"].unpatch()
    assert "forward" not in vars(model)


def test_a_patched_layer():
    model, input_ids = tiny_model(dtype=torch.float32), full_rows()
    expected = tiny_model(dtype=torch.float32)(input_ids).logits
    names = run(LAYER, attention_layer=model.model.layers[0].self_attn)
    torch.testing.assert_close(model(input_ids, use_cache=False).logits, expected, atol=FLOAT32, rtol=0)
    assert names["patcher"].stats["tokens_packed"] == 2 * 9 + 6 * 4


def test_flash_attention_parameters():
    """Against attention under the very mask, with the kernels' own rule for causal blocks: bottom right."""
    blocks = [(3, 5), (1, 1), (4, 4), (2, 7)]
    mask = torch.block_diag(*(torch.ones(q, k).tril(k - q) for q, k in blocks))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, generator=g) for n in (mask.shape[0], mask.shape[1], mask.shape[1]))

    def attend(q, k, v, mask):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    def flash_attention_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        lens_q, lens_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max(lens_q), max(lens_k)) == (max_seqlen_q, max_seqlen_k)
        parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), strict=True)
        return torch.cat(
            [attend(a, b, c, torch.ones(len(a), len(b)).tril(len(b) - len(a)).bool()) for a, b, c in parts]
        )

    names = run("from zorro_verl.zorro_train import ZoRRoTrain", FLASH, attention_mask=mask, **locals())
    torch.testing.assert_close(names["output"], attend(q, k, v, mask.bool()))


def test_the_actor(tmp_path, capsys):
    plain = tiny_model(dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    batch = BATCH | {"advantages": torch.ones(8, WIDTH), "old_log_probs": torch.full((8, WIDTH), -4.0)}
    sample = ACTOR.replace("Qwen/Qwen3-0.6B", str(tmp_path)).replace('"cuda"', '"cpu"')
    names = run(sample, batch=batch)
    log_probs, entropies = per_row(plain, ROWS)
    torch.testing.assert_close(names["log_probs"], torch.cat(log_probs), atol=FLOAT32, rtol=0)
    torch.testing.assert_close(names["entropy"], torch.cat(entropies), atol=FLOAT32, rtol=0)
    assert re.fullmatch(r"Policy loss: -?\d+\.\d{4}\n", capsys.readouterr().out)
    assert all(p.grad is not None for p in names["actor"].model.parameters())


def test_the_analysis(capsys):
    """A batch that gives the documented figures: one prompt of 15.9Ki, sixteen responses of 0.4Ki to 1.0Ki."""
    prompt, lens = 16251, [410, 1024, *[640] * 13, 645]
    mask = torch.zeros(16, prompt + 4096, dtype=torch.long)
    for row, length in enumerate(lens):
        mask[row, : prompt + length] = 1
    run(ANALYSIS, input_ids=torch.arange(prompt + 4096).expand(16, -1), attention_mask=mask)
    line = capsys.readouterr().out
    assert line.startswith("batch stats: prompt lens: 15.9Ki resp count=16/min=0.4Ki/mean=0.6Ki/max=1.0Ki ")
    assert re.search(r"non-pad-tokens=26\.\dK/8\d\.\d%\n$", line)
    assert line.count("\n") == 1
