"""Rows with images and videos in the stand-alone actor, against the plain model on one row at a time."""

import copy

import numpy as np
import pytest
import tiny_models
import torch
from tiny import VOCAB, flat_rows, gradients, padded_batch, worst_gradient

from zorro_verl.grouping import find_prompt_groups
from zorro_verl.media import Media, Vision

FLOAT64 = 5e-6
IMAGE, VIDEO, START, END = (tiny_models.PLACEHOLDERS[name] for name in tiny_models.PLACEHOLDERS)
TEXT_VOCAB = min(IMAGE, VIDEO, START, END)
PATCH = 3 * 2 * tiny_models.VISION["patch_size"] ** 2
PATCHES_PER_FEATURE = 4  # spatial_merge_size 2


def text(length, generator):
    return torch.randint(1, TEXT_VOCAB, (length,), generator=generator)


def images(generator, *grids, kind="image"):
    """What a row brings: random patches for each grid of frames, height and width."""
    grid = torch.tensor(grids)
    patches, name = torch.randn(int(grid.prod(-1).sum()), PATCH, generator=generator), f"{kind}_grid_thw"
    return {"pixel_values" if kind == "image" else "pixel_values_videos": patches, name: grid}


def seen(generator, *grids, kind="image"):
    """The tokens of a prompt that shows them: text, and for each a run of placeholders between its marks."""
    placeholder = IMAGE if kind == "image" else VIDEO
    shown = [torch.tensor([START, *[placeholder] * (np.prod(g) // PATCHES_PER_FEATURE), END]) for g in grids]
    return torch.cat([text(3, generator), *shown, text(2, generator)])


def mrope(row, media):
    """Positions as verl sends them, ``(4, L)``: of the text, and of time, height and width, which jump at an image."""
    text_axis = torch.arange(len(row))[None]
    kinds = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    grids = {name: media[name] for name in ("image_grid_thw",) if name in (media or {})}
    if not grids:
        return text_axis.expand(4, -1) + 7 * (row == VIDEO).cumsum(0)  # of videos no more than that they jump
    axes, _ = model().model.get_rope_index(row[None], kinds[None], **grids, attention_mask=torch.ones(1, len(row)))
    return torch.cat([text_axis, axes[:, 0]])


def mixed_rows(seed=0):
    """Text rows of one prompt between rows with media, four of them with the same tokens.

    ``(prompt, response, media)`` of: text, image X, image Y, text, X again, two images, text, a video, X once more in
    another prompt, Y before a prompt of the same length.
    """
    g = torch.Generator().manual_seed(seed)
    question, shown = text(9, g), seen(g, (1, 4, 4))
    x, y = images(g, (1, 4, 4)), images(g, (1, 4, 4))
    two, two_shown = images(g, (1, 2, 4), (1, 4, 2)), seen(g, (1, 2, 4), (1, 4, 2))
    video, video_shown = images(g, (2, 2, 4), kind="video"), seen(g, (2, 2, 4), kind="video")
    responses = [text(n, g) for n in (4, 3, 5, 1, 6, 2, 0, 4, 2, 3)]
    prompts = [question, shown, shown, question, shown, two_shown, question, video_shown, seen(g, (1, 4, 4)), shown]
    media = [None, x, y, {}, copy.deepcopy(x), two, None, video, x, y]
    return list(zip(prompts, responses, media, strict=True))


_models = {}


def model():
    if not _models:
        _models["plain"] = tiny_models.build("qwen3_5")
    return _models["plain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_5")
    model().save_pretrained(path)
    return str(path)


def make_actor(folder, **options):
    from zorro_verl.actor import DeduplicatedActor

    return DeduplicatedActor(model_name_or_path=folder, device="cpu", dtype=torch.float64, **options)


def batch_of(rows, axes=4):
    batch = padded_batch([(prompt, response) for prompt, response, _ in rows])
    positions = torch.zeros(len(rows), 4, batch["input_ids"].shape[1], dtype=torch.int64)
    for row, (prompt, response, media) in enumerate(rows):
        positions[row][:, batch["attention_mask"][row].bool()] = mrope(torch.cat([prompt, response]), media)
    batch["position_ids"] = positions[:, 4 - axes :] if axes else positions[:, 0]
    batch["multi_modal_inputs"] = [media for _, _, media in rows]
    return batch


def oracle(plain, rows, batch):
    """Log-probs of each row by itself, at the positions of the batch."""
    log_probs = []
    for row, (prompt, response, media) in enumerate(rows):
        ids = torch.cat([prompt, response])
        positions = batch["position_ids"][row][..., batch["attention_mask"][row].bool()]
        logits = plain(
            ids[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            **{name: value.double() if value.is_floating_point() else value for name, value in (media or {}).items()},
        ).logits[0]
        log_p = logits[len(prompt) - 1 : len(ids) - 1].log_softmax(-1)
        log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
    return log_probs


def weighted(log_probs):
    g = torch.Generator().manual_seed(5)
    return sum((x * torch.randn(len(x), generator=g, dtype=torch.float64)).sum() for x in log_probs)


def expected(rows, batch):
    plain = copy.deepcopy(model())
    log_probs = oracle(plain, rows, batch)
    weighted(log_probs).backward()
    return [x.detach() for x in log_probs], gradients(plain)


@pytest.mark.parametrize("axes", [4, 3, 0])
def test_every_row_and_gradient_equals_the_plain_model(folder, axes):
    rows = mixed_rows()
    batch = batch_of(rows, axes)
    log_probs, grads = expected(rows, batch)
    actor = make_actor(folder)
    output = actor.forward(batch).logprobs.split([len(r) for _, r, _ in rows])
    for row, (a, b) in enumerate(zip(log_probs, output, strict=True)):
        assert not len(a) or (a - b).abs().max() <= FLOAT64, row
    weighted(output).backward()
    got = gradients(actor.model)
    assert max(float(g.abs().max()) for name, g in got.items() if "visual" in name) > 1e-3
    assert worst_gradient(grads, got) <= FLOAT64
    # X and Y come twice each in the same prompt; the other X, the two images and the video have prompts of their own.
    total = sum(len(p) + len(r) for p, r, _ in rows)
    assert dict(actor.stats) == {
        "tokens_total": total,
        "tokens_packed": total - 2 * len(rows[0][0]),
        "token_ratio": total / (total - 2 * len(rows[0][0])),
        "groups": 6,
        "groups_split": 0,
        "fallback": {"group_cut": 0, "multimodal": 4},
    }


def test_another_image_is_another_answer(folder):
    """Without it the test above could not fail for images that were mixed up."""
    rows = mixed_rows()
    plain, batch = model(), batch_of(rows)
    with torch.no_grad():
        x, y = oracle(plain, [rows[1], (*rows[1][:2], rows[2][2])], {k: v[[1, 1]] for k, v in tensors(batch).items()})
    assert (x - y).abs().max() > 1e-2


def tensors(batch):
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("budget", [None, 40])
def test_scores_and_a_step_on_a_data_proto(folder, budget):
    from verl import DataProto
    from verl.workers.config import FSDPActorConfig

    rows = mixed_rows()
    batch = batch_of(rows)
    log_probs, _ = expected(rows, batch)
    g = torch.Generator().manual_seed(1)
    old = torch.zeros(batch["responses"].shape, dtype=torch.float64)
    for row, values in enumerate(log_probs):
        old[row, : len(values)] = values
    advantages = torch.randn(old.shape, generator=g, dtype=torch.float64)
    media = np.array(batch.pop("multi_modal_inputs"), dtype=object)
    settings = {} if budget is None else {"max_token_len": budget}
    data = DataProto.from_single_dict(
        batch | {"old_log_probs": old, "advantages": advantages, "multi_modal_inputs": media}, meta_info=settings
    )
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=len(rows), use_dynamic_bsz=True)
    config.optim.clip_grad = 1e9
    actor = make_actor(folder, actor_config=config)
    scored = actor.compute_log_prob(data)["log_probs"]
    assert (scored - old).abs().max() <= FLOAT64
    assert actor.stats["fallback"]["multimodal"] == 4

    # At ratio 1 the loss of a token is minus its advantage times its log-prob, but for a constant.
    plain = copy.deepcopy(model())
    in_order = torch.cat([advantages[row, : len(x)] for row, x in enumerate(log_probs)])
    (-(torch.cat(oracle(plain, rows, batch)) * in_order).mean()).backward()
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in actor.model.named_parameters()}
    metrics = actor.update_policy(data)
    moved = {name: before[name] - p.detach() for name, p in actor.model.named_parameters()}
    assert worst_gradient(gradients(plain), moved) <= FLOAT64
    assert metrics["zorro/fallback/multimodal"] == 4
    assert metrics["zorro/groups"] == 6
    assert metrics["zorro/groups_split"] == metrics["zorro/fallback/group_cut"] == 0


def test_rows_that_stay_alone_are_groups_of_their_own():
    rows = flat_rows([(torch.tensor(p), torch.tensor([9])) for p in ([1, 2], [1, 2], [1, 2], [3], [1, 2], [3])])
    assert find_prompt_groups(rows).tolist() == [0, 0, 0, 1, 0, 1]
    rows.alone[[1, 3]] = True
    assert find_prompt_groups(rows).tolist() == [0, 1, 0, 2, 0, 3]


def hashes(rows):
    media = Media([m for _, _, m in rows], Vision({"image": IMAGE, "video": VIDEO}, 2, PATCH))
    return media.fingerprints(flat_rows([(p, r) for p, r, _ in rows])).tolist()


def test_media_of_the_prompt_are_told_apart():
    g = torch.Generator().manual_seed(0)
    prompt, x = seen(g, (1, 4, 4)), images(g, (1, 4, 4))
    late = torch.tensor([START, IMAGE, END])
    another = {name: torch.cat([x[name], value]) for name, value in images(g, (1, 2, 2)).items()}
    swapped = x | {"pixel_values": x["pixel_values"].flip(0)}
    wide = x | {"image_grid_thw": torch.tensor([[1, 2, 8]])}
    values = hashes(
        [
            (prompt, text(2, g), x),
            (prompt, text(2, g), copy.deepcopy(x)),
            (prompt, late, another),  # one more in the response: the same prompt
            (text(3, g), late, images(g, (1, 2, 2))),
            (text(3, g), text(2, g), None),
            (prompt, text(2, g), swapped),
            (prompt, text(2, g), wide),
        ]
    )
    assert values[0] == values[1] == values[2] != 0
    assert values[3] == values[4] == 0
    assert len({values[0], values[5], values[6], 0}) == 4


def changed(**change):
    """The batch with something else in its second row, which shows one image of four features."""

    def apply(batch):
        media = batch["multi_modal_inputs"]
        media[1] = {name: value for name, value in (media[1] | change).items() if value is not None}

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(pixel_values=None), "pixel_values and image_grid_thw together.*row 1"),
        (
            changed(image_grid_thw=torch.tensor([[1, 4, 2]])),
            r"pixel_values: expected \(8, 96\) floats in row 1.*got \(16",
        ),
        (
            changed(image_grid_thw=torch.tensor([[1, 1, 16]])),
            r"image_grid_thw: .*multiples of 2, got \[\[1, 1, 16\]\] in row 1",
        ),
        (changed(image_grid_thw=torch.tensor([[-1, -4, 4]])), "image_grid_thw: .*at least 1"),
        (changed(image_grid_thw=torch.tensor([[1.0, 4, 4]])), "image_grid_thw: .*integers"),
        (
            changed(image_grid_thw=[[1, 4, 4]]),
            "pixel_values and image_grid_thw as tensors, got Tensor and list in row 1",
        ),
        (changed(pixel_values=torch.ones(16, 95)), r"pixel_values: expected \(16, 96\) floats"),
        (changed(pixel_values=torch.ones(16, 96, dtype=torch.int64)), "pixel_values: expected.*int64"),
        (changed(**{"0": 1, "x": 2}), "'0', 'x'"),
        (
            lambda b: b.update(multi_modal_inputs=3),
            "multi_modal_inputs: expected an entry for each of 10 rows, got int",
        ),
        (changed(image_grid_thw=torch.tensor([1, 4, 4])), "image_grid_thw"),
        (changed(input_features=torch.ones(1)), "input_features.*row 1"),
        (changed(**images(torch.Generator(), (1, 2, 4))), "expected 2 placeholder tokens.*row 1.*got 4"),
        (lambda b: b["multi_modal_inputs"].pop(), "multi_modal_inputs: expected an entry for each of 10 rows, got 9"),
        (lambda b: b["multi_modal_inputs"].__setitem__(0, [1]), "multi_modal_inputs: expected a mapping"),
        (lambda b: b.update(position_ids=b["position_ids"][:, :2]), "position_ids.*3 or 4 axes, got 2"),
    ],
)
def test_bad_media_are_named(folder, change, message):
    batch = batch_of(mixed_rows())
    change(batch)
    with pytest.raises(ValueError, match=message):
        make_actor(folder).forward(batch)


def test_a_row_that_brings_no_image_is_a_row_of_text(folder):
    batch, actor = batch_of(mixed_rows()), make_actor(folder)
    plain = actor.forward(batch).logprobs
    before = dict(actor.stats)
    for row, media in enumerate(batch["multi_modal_inputs"]):
        if not media:
            nothing = {"pixel_values": torch.zeros(0, PATCH), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
            batch["multi_modal_inputs"][row] = nothing
    assert torch.equal(actor.forward(batch).logprobs, plain)
    assert dict(actor.stats) == before


def test_a_placeholder_by_chance_is_a_token_where_no_row_has_media(folder):
    g = torch.Generator().manual_seed(3)
    prompt = text(4, g)
    rows = [(prompt, torch.cat([text(n, g), torch.tensor([IMAGE, VIDEO])]), None) for n in (1, 2, 3)]
    batch, actor = batch_of(rows, axes=0), make_actor(folder)
    log_probs, _ = expected(rows, batch)
    assert (torch.cat(log_probs) - actor.forward(batch).logprobs).abs().max() <= FLOAT64
    rows = [*rows, mixed_rows()[1]]
    with pytest.raises(ValueError, match="expected 0 placeholder tokens .* in row 0.*got 1"):
        actor.forward(batch_of(rows))


def test_what_serves_the_positions_alone_is_left_out(folder):
    rows = mixed_rows()
    batch, actor = batch_of(rows), make_actor(folder)
    before = actor.forward(batch).logprobs
    media = batch["multi_modal_inputs"]
    media[1] = media[1] | {"images_seqlens": torch.tensor([16]), "mm_token_type_ids": torch.ones(1, VOCAB)}
    media[2] = media[2] | {"pixel_values_videos": None}
    assert torch.equal(before, actor.forward(batch).logprobs)
