"""Engine level: veRL's own training workers in bfloat16, with the strategies fsdp2 and zorro, in one process.

Both get the same weights, batch and token budget of a micro-batch, which the stock side spends on rows and the other on
packed tokens. The stock side runs on flash-attn without padding where that is installed, else on sdpa, which needs no
mask as long as all rows are equally long. Its head runs on every token of its rows, and the bound counts it there.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from functools import cached_property

import torch
import torch.distributed as dist
from bench_engine import Worker, jagged, with_old_log_probs
from gpu_bench.batch import Batch
from gpu_bench.comparison import Results
from gpu_bench.contest import Contestant
from gpu_bench.models import Work
from gpu_bench.stock import PEAKED
from gpu_bench.work import operations
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, PretrainedConfig

TOKEN_BUDGET = 32768  # of a micro-batch


class EngineLevel:
    """Two workers on one checkpoint of random weights, in a folder of its own.

    Args:
        config: sizes of the model.
        device: "cuda" or "cpu".
        attention: attn_implementation of the shared side's model.
    """

    def __init__(self, config: PretrainedConfig, device: str, attention: str):
        self.config, self.device, self.attention = config, device, attention
        # What a launcher would set; this process has no other use for them.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        if device == "cpu":
            os.environ["VERL_PLATFORM"] = "cpu"
        else:
            torch.cuda.set_device(0)
        backend = "cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.folder = tempfile.TemporaryDirectory()
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.q_norm.weight, PEAKED)
        model.save_pretrained(self.folder.name)
        has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        self.stock_attention = "flash_attention_2" if has_flash else "sdpa"

    @cached_property
    def stock(self) -> Worker:
        return self._worker("fsdp2", self.stock_attention)

    @cached_property
    def shared(self) -> Worker:
        return self._worker("zorro", self.attention)

    def _worker(self, strategy: str, attention: str, precision: str = "bf16") -> Worker:
        layout = "remove-padding" if attention == "flash_attention_2" else "padded"
        return Worker(strategy, self.folder.name, layout, attention, precision, TOKEN_BUDGET)

    def reference(self, batch: Batch, work: Work) -> Results:
        """The stock worker in float32."""
        worker = self._worker("fsdp2", "sdpa", precision="fp32")
        step = _EngineStep(self, worker, as_tensordict(batch), work)
        step.run()
        return step.results()

    def contestants(self, batch: Batch, work: Work) -> tuple[Contestant, ...]:
        prompts = sum(prompt * len(responses) for prompt, responses in batch.groups)
        head = 2 * self.config.hidden_size * self.config.vocab_size * work.passes.head
        full = operations(self.config, batch.groups, work.passes, shared=False) + prompts * head
        less = operations(self.config, batch.groups, work.passes, shared=True)
        data = as_tensordict(batch)
        return (
            Contestant(
                f"fsdp2, {self.stock_attention}", "baseline", lambda: _EngineStep(self, self.stock, data, work), full
            ),
            Contestant("zorro", "ours", lambda: _EngineStep(self, self.shared, data, work), less),
        )

    def close(self) -> None:
        """Workers stay until the process ends."""
        self.folder.cleanup()
        dist.destroy_process_group()


class _EngineStep:
    """One of veRL's two calls. The learning rate is 0: every run starts from the same weights."""

    def __init__(self, level: EngineLevel, worker: Worker, data: TensorDict, work: Work):
        self.level, self.worker, self.data, self.work = level, worker, data, work
        if work.backward and "old_log_probs" not in data.keys():
            with_old_log_probs(data, [row.float() for row in level.stock.compute_log_prob(data)["log_probs"]])

    def reset(self) -> None:
        self.output = {}

    def run(self) -> None:
        call = self.worker.update_actor if self.work.backward else self.worker.compute_log_prob
        self.output = call(self.data)

    def results(self) -> Results:
        lens = self.data["responses"].offsets().diff().tolist()
        if self.work.backward:
            return Results({}, lens, self.worker.gradients(self.data))
        return Results({name: torch.cat(rows) for name, rows in self.output.items()}, lens, {})


def as_tensordict(batch: Batch) -> TensorDict:
    """The rows as veRL's trainer hands them to its workers; one advantage for each row."""
    rows = batch.rows
    tokens = rows.tokens.cpu().split(rows.lens.tolist())
    prompts = [row[:length] for row, length in zip(tokens, rows.prompt_lens.tolist(), strict=True)]
    responses = [row[length:] for row, length in zip(tokens, rows.prompt_lens.tolist(), strict=True)]
    advantages = torch.randn(rows.num_rows, generator=torch.Generator().manual_seed(4)).tolist()
    mask = jagged([torch.ones_like(response) for response in responses])
    fields = {
        "input_ids": jagged(tokens),
        "position_ids": jagged([torch.arange(row.numel()) for row in tokens]),
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": jagged([torch.full(row.shape, value) for row, value in zip(responses, advantages, strict=True)]),
    }
    return TensorDict(fields, batch_size=rows.num_rows)
