"""What the demo trains on, made offline: problems, few-shot chats, a tokenizer, a small Qwen3, rows for veRL."""

import json
import random
from dataclasses import dataclass

import reasoning_gym
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TASK = "products"
SHOTS = 12
# The verifier pays in full for the bare number only, so a model that learned from all three can get better in two ways:
# drop the words, and know the product.
STYLES = ("{}", "It is {}", "{}, I think")
STYLE_WEIGHTS = (0.35, 0.325, 0.325)

# `generation` marks the answers, so that one template serves sampling and supervised labels. The newline at the end of
# a turn is spelled out: one that follows a block is trimmed.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    factors: tuple[str, ...]  # sorted: 3 * 5 and 5 * 3 are the same fact
    as_json: str  # all that reasoning-gym says about it; its verifier asks for this


def make_problems(size: int, seed: int) -> list[Problem]:
    """Products of two one-digit factors: 100 facts, few enough to be learned in a minute."""
    dataset = reasoning_gym.create_dataset(TASK, size=size, seed=seed, min_digits=1, max_digits=1)
    return [
        Problem(
            question=entry["question"].strip(),
            answer=entry["answer"],
            factors=tuple(sorted(entry["metadata"]["expression"].split(" * "))),
            as_json=json.dumps(entry),
        )
        for entry in dataset
    ]


def few_shot_chat(problem: Problem, shots: list[Problem], styles: list[str] | None = None) -> list[dict[str, str]]:
    """Solved problems as turns of a chat, then the question. Styles are of the shots; bare numbers if not given."""
    chat = []
    for shot, style in zip(shots, styles or [STYLES[0]] * len(shots), strict=True):
        chat += [user(shot.question), assistant(style.format(shot.answer))]
    return [*chat, user(problem.question)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def draw_shots(problem: Problem, pool: list[Problem], rng: random.Random) -> list[Problem]:
    """Shots none of which is the question: its answer has to be known, it can't be copied."""
    return rng.sample([other for other in pool if other.factors != problem.factors], SHOTS)


def build_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, digits one by one."""
    texts = [text for p in problems for text in (p.question, *(style.format(p.answer) for style in STYLES))]
    texts += ["user\n", "assistant\n"] * len(problems)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """0.83 million random parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def verl_row(problem: Problem, shots: list[Problem], index: int, split: str) -> dict:
    """One row of a parquet file as veRL's dataset and naive reward manager read it."""
    return {
        "data_source": TASK,
        "prompt": few_shot_chat(problem, shots),
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "problem": problem.as_json},
    }
