"""verl's engine with experts, Gated DeltaNet layers and vision towers, against the plain model on one row at a time."""

import pytest
import tiny_models
import torch
from ranks import run_ranks
from test_engine import build_engine, full_gradients, responses
from test_media import mixed_rows, mrope, text
from tiny import jagged, shuffled, verl_batch, worst_gradient

TOLERANCE = 2e-5
NAMES = ("qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


def text_rows(seed):
    """Rows of three prompts, interleaved, on both sides of a chunk of the recurrence and of the conv's window."""
    g = torch.Generator().manual_seed(seed)
    groups = [(text(p, g), ns) for p, ns in ((66, (4, 1, 70)), (2, (3, 9, 5)), (11, (1, 6, 4)))]
    return shuffled([(prompt, text(n, g), None) for prompt, ns in groups for n in ns], seed)


def rows_of(name, rank):
    """Of models with a vision tower, the first of two ranks brings images, and the other none."""
    if name not in tiny_models.COMPOSITE or rank != 0:
        return text_rows(rank)
    return without_video(mixed_rows())


def without_video(rows):
    return [row for row in rows if "pixel_values_videos" not in (row[2] or {})]


def positions_of(name, rows):
    """Of models with a vision tower, with four axes; of rows without media one jumps, and not in each alike."""
    if name not in tiny_models.COMPOSITE:
        return [torch.arange(len(p) + len(r)) for p, r, _ in rows]
    positions = []
    for row, (prompt, response, media) in enumerate(rows):
        axes = mrope(torch.cat([prompt, response]), media).clone()
        if not media and row % 3 == 0:
            axes[2, 1:] += 5
        positions.append(axes)
    return positions


def batch_of(name, rows, seed, positions=None, **settings):
    data = verl_batch([row[:2] for row in rows], seed, temperature=0.7, use_remove_padding=False, **settings)
    data["position_ids"] = jagged(positions or positions_of(name, rows))
    if any(media for *_, media in rows):
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor_stack(data, "multi_modal_inputs", [media for *_, media in rows])
    return data


def weighted(log_probs, entropy, data):
    """A loss in which every log-prob and every entropy has a weight of its own."""
    weights = zip(data["advantages"].unbind(), data["ref_log_prob"].unbind(), strict=True)
    terms = zip(log_probs, entropy, weights, strict=True)
    return sum((x * w).sum() + 0.3 * (e * (v + 4)).sum() for x, e, (w, v) in terms)


def engine_loss(model_output, data, dp_group=None):
    """FSDP takes the mean over ranks of what is a sum here."""
    values = [responses(model_output[key], data) for key in ("log_probs", "entropy")]
    return weighted(*values, data) * torch.distributed.get_world_size(), {}


def oracle(name, rows, data, model):
    """Log-probs and entropies of this rank's rows, and the gradients of the loss over all ranks."""
    log_probs, entropies = [], []
    for (prompt, response, media), positions in zip(rows, positions_of(name, rows), strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = model(
            ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            **(media or {}),
        ).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    weighted(log_probs, entropies, data).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # not every rank saw an image
        torch.distributed.all_reduce(p.grad)
    grads = {parameter: p.grad for parameter, p in model.named_parameters()}
    return [x.detach() for x in log_probs], [x.detach() for x in entropies], grads


def worst_row(expected, output, data):
    """The largest difference in any row's log-probs and entropies."""
    differences = [
        float((a - b).abs().max())
        for values, key in zip(expected[:2], ("log_probs", "entropy"), strict=True)
        for a, b in zip(values, responses(output[key], data), strict=True)
        if len(a)
    ]
    return max(differences)


def family(rank, paths, checkpointing):
    """Every model in one process; the plain ones first, since verl changes classes when it loads a model of theirs."""
    from zorro_verl.families import auto_class
    from zorro_verl.options import ZorroOptions

    expected = {}
    for name, path in paths.items():
        rows = rows_of(name, rank)
        data = batch_of(name, rows, seed=rank)
        config = tiny_models.AutoConfig.from_pretrained(path)
        plain = auto_class(config).from_pretrained(path, dtype=torch.float32)
        expected[name] = rows, data, oracle(name, rows, data, plain)
    for name, path in paths.items():
        rows, data, truth = expected[name]
        alone = torch.distributed.get_world_size() == 1
        for mode in ("expand", "fork") if alone and name != "qwen3_moe" else ("auto",):
            engine = build_engine(path, "zorro", checkpointing, zorro=ZorroOptions(linear_attention=mode))
            assert engine.module.forward.linear_attention == mode
            with engine.eval_mode():
                scored = engine.infer_batch(batch_of(name, rows, seed=rank))["model_output"]
            assert worst_row(truth, scored, data) <= TOLERANCE, (name, mode)
            with engine.train_mode():
                engine.optimizer_zero_grad()
                cut = batch_of(name, rows, seed=rank, max_token_len_per_gpu=160)
                metrics = engine.forward_backward_batch(cut, engine_loss)["metrics"]
                grads = full_gradients(engine)
            assert worst_gradient(truth[2], grads) <= TOLERANCE, (name, mode)
            assert metrics["zorro/tokens_packed"][0] < metrics["zorro/tokens_total"][0]
        for strategy in ("zorro", "fsdp2") if alone else ("zorro",):
            engine = build_engine(path, strategy, forward_only=True)  # the stock one runs on padded rows
            with engine.eval_mode():
                scored = engine.infer_batch(batch_of(name, rows, seed=rank))["model_output"]
            assert worst_row(truth, scored, data) <= TOLERANCE, (name, strategy)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    for name, path in paths.items():
        tiny_models.build(name, torch.float32).save_pretrained(path)
    return paths


@pytest.mark.feature(
    "data.image_key data.video_key",
    "counted",
    "rows with media run whole, as `zorro/fallback/multimodal`; text rows beside them share",
)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "checkpointing"), [(1, False), (2, True)])
def test_every_type_equals_the_plain_model(checkpoints, world_size, checkpointing):
    run_ranks(family, world_size, checkpoints, checkpointing, timeout=300)


def packed_rows(rank, path):
    """Scores of the same rows by verl's engine, which packs them end to end, and by the one that shares."""
    from zorro_verl.families import auto_class

    rows = text_rows(0)
    data = batch_of("qwen3_next", rows, seed=0)
    plain = auto_class(tiny_models.AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    truth, worst = oracle("qwen3_next", rows, data, plain), {}
    for strategy in ("fsdp2", "zorro"):
        engine = build_engine(path, strategy, forward_only=True, model={"use_remove_padding": True})
        packed = batch_of("qwen3_next", rows, seed=0)
        packed.set_non_tensor("use_remove_padding", True)
        with engine.eval_mode():
            worst[strategy] = worst_row(truth, engine.infer_batch(packed)["model_output"], data)
    return worst


@pytest.mark.slow
def test_verls_packing_leaks_from_row_to_row_where_sharing_does_not(checkpoints):
    """A row that follows another in verl's packed row starts its recurrence from the other's state."""
    (worst,) = run_ranks(packed_rows, 1, checkpoints["qwen3_next"])
    assert worst["fsdp2"] > 0.1
    assert worst["zorro"] <= TOLERANCE


def refused(rank, path):
    """Both ranks hear of what only the first one's rows bring, and go on afterwards."""
    engine = build_engine(path, "zorro", forward_only=True)
    miscounted = without_video(mixed_rows())
    prompt, response, media = miscounted[1]
    miscounted[1] = (prompt, torch.cat([response, torch.tensor([tiny_models.PLACEHOLDERS["image_token_id"]])]), media)
    for rows, message in (
        (mixed_rows(), "expected images or videos on a rank, got both.*rank 0"),
        (miscounted, "expected 4 placeholder tokens .* in row 1, .*got 5"),
        ([*mixed_rows()[:1], (*mixed_rows()[1][:2], {"input_features": torch.ones(1)})], "input_features"),
    ):
        rows = rows if rank == 0 else text_rows(0)
        data = batch_of("qwen3_5", rows, seed=0, positions=positions_of("text", rows))
        with engine.eval_mode(), pytest.raises(ValueError, match=message):
            engine.infer_batch(data)
    with engine.eval_mode():
        engine.infer_batch(batch_of("qwen3_5", text_rows(rank), seed=0))


@pytest.mark.slow
def test_media_that_cannot_be_are_named_on_every_rank(checkpoints):
    run_ranks(refused, 2, checkpoints["qwen3_5"])
