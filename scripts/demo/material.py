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
# The verifier pays in full for the bare number only. Wordy and wrong demonstrations leave a model that can get better
# in two ways: drop the words, and say the product that it knows rather than another.
STYLES = ("{}", "It is {}", "{}, I think")
STYLE_WEIGHTS = (0.35, 0.325, 0.325)
WRONG_ANSWERS = 0.15

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


def few_shot_chat(problem: Problem, shots: list[Problem]) -> list[dict[str, str]]:
    """Solved problems as turns of a chat, then the question."""
    chat = []
    for shot in shots:
        chat += [user(shot.question), assistant(shot.answer)]
    return [*chat, user(problem.question)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def demonstration(pool: list[Problem], rng: random.Random, shots: int, wrong: float) -> list[dict[str, str]]:
    """A whole chat to learn from, in mixed styles; a share of the answers are wrong."""
    chat = []
    for problem in rng.sample(pool, shots + 1):
        (style,) = rng.choices(STYLES, STYLE_WEIGHTS)
        answer = rng.choice(pool).answer if rng.random() < wrong else problem.answer
        chat += [user(problem.question), assistant(style.format(answer))]
    return chat


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
        initializer_range=0.05,  # the default is meant for wide layers; these learn several times slower from it
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
