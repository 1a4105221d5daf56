"""The rollout server: collects requests into batches, generates in a thread, takes new weights between batches."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from zorro_verl.cpu_runtime.generation import NOTHING, Completion, PromptSharingGenerator, Request, Sampling
from zorro_verl.cpu_runtime.seeding import request_seed, rollout_seed
from zorro_verl.cpu_runtime.weights import load_weights

logger = logging.getLogger(__name__)

# How long a batch stays open after its last request. The requests of a step come in a stream, a few milliseconds apart.
COLLECT_SECONDS = 0.02


@dataclass
class _Waiting:
    """A request and where its answer goes."""

    request: Request
    answer: asyncio.Future

    def succeed(self, output: TokenOutput) -> None:
        if not self.answer.done():  # given up by the caller
            self.answer.set_result(output)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class HFServer:
    """One Ray actor per replica: verl's token-in-token-out interface over `PromptSharingGenerator`.

    Each request brings a seed that says which rollout it is (`seeding`). One that comes without, from an agent loop of
    another make, gets the number of its arrival among the requests with the same prompt under the same weights; that is
    reproducible as far as the order of arrivals is.
    """

    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig, replica_rank: int):
        self._config: RolloutConfig = omega_conf_to_dataclass(rollout_config)
        model_config = omega_conf_to_dataclass(model_config)
        self._replica_rank = replica_rank
        self._generator = _build_generator(self._config, model_config)
        self._weights_version: int | None = None
        self._arrivals: Counter = Counter()
        self._waiting: list[_Waiting] = []  # in no batch yet
        self._arrived = asyncio.Event()
        self._generating = asyncio.Event()
        self._generating.set()
        self._rejecting = False
        self._abort_batch = threading.Event()
        self._weights_lock = asyncio.Lock()
        self._batches: asyncio.Task | None = None

    async def generate(
        self, prompt_ids, sampling_params: Mapping, request_id: str, image_data=None, video_data=None, **others
    ) -> TokenOutput:
        """Complete one prompt, in a batch with whatever else is waiting."""
        given = {"image_data": image_data, "video_data": video_data, **others}
        refused = sorted(name for name, value in given.items() if value)
        if refused:
            raise ValueError(f"rollout.name=hf generates from text only, but request {request_id} brings {refused}")
        if self._batches is None:
            self._batches = asyncio.create_task(self._serve())
        waiting = _Waiting(self._request(prompt_ids, sampling_params), asyncio.get_running_loop().create_future())
        if self._rejecting:
            waiting.succeed(self._output(NOTHING))
        else:
            self._waiting.append(waiting)
            self._arrived.set()
        output: TokenOutput = await waiting.answer
        if not sampling_params.get("logprobs"):
            output.log_probs = None
        return output

    async def load_weights(self, weights: Mapping[str, torch.Tensor], global_steps: int | None) -> None:
        """Take the actor's weights; every prompt's kept state goes."""
        async with self._weights_lock:
            load_weights(self._generator.model, weights)
            self._generator.forget_prompts()
            self._arrivals.clear()
            self._weights_version = global_steps

    async def ready(self) -> bool:
        """True once the model is there."""
        return True

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Answer every request with what it has, as "aborted", and return when the running batch has come to its end.

        verl's client asks again with these tokens behind the prompt, and puts the parts together. Requests that come
        before `resume_generation` are held until then, or aborted at once with `reject_request`: the client then looks
        for another server.
        """
        self._generating.clear()
        self._rejecting = reject_request
        self._abort_batch.set()
        for waiting in self._waiting:
            waiting.succeed(self._output(NOTHING))
        self._waiting.clear()
        async with self._weights_lock:
            return

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._generating.set()

    # Weights and prompt states stay in the process, which has no memory to lend to a trainer on another device.

    async def wake_up(self, tags=None) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs) -> None: ...

    async def stop_profile(self) -> None: ...

    def _request(self, prompt_ids, sampling_params: Mapping) -> Request:
        params = {"ignore_eos": self._config.ignore_eos, **sampling_params}
        prompt = tuple(int(token) for token in prompt_ids)
        seed = params.get("seed")
        if seed is None:
            key = request_seed(0, prompt)
            seed = rollout_seed(self._config.seed, self._replica_rank, self._weights_version, self._arrivals[key])
            self._arrivals[key] += 1
        return Request(prompt, self._max_tokens(prompt, params), seed, Sampling.from_verl(params))

    def _max_tokens(self, prompt: tuple[int, ...], params: Mapping) -> int:
        room = self._context_length() - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in the context of {self._context_length()} tokens: "
                "lower data.max_prompt_length or raise rollout.max_model_len"
            )
        # What is left of prompt_length + response_length: later turns of a conversation have longer prompts.
        budget = self._config.prompt_length + self._config.response_length - len(prompt)
        asked = params.get("max_tokens", params.get("max_new_tokens", min(self._config.response_length, budget)))
        return max(1, min(asked, room))

    def _context_length(self) -> int:
        return self._config.max_model_len or self._generator.model.config.get_text_config().max_position_embeddings

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            await self._generating.wait()
            await self._until_no_more_come()
            async with self._weights_lock:
                batch = self._next_batch()
                if batch:
                    await self._answer(batch)

    async def _until_no_more_come(self) -> None:
        seen = 0
        while seen < len(self._waiting) < self._config.max_num_seqs:
            seen = len(self._waiting)
            await asyncio.sleep(COLLECT_SECONDS)

    def _next_batch(self) -> list[_Waiting]:
        """What has collected; nothing after an abort."""
        if not self._generating.is_set():
            return []
        size = self._config.max_num_seqs
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        if not self._waiting:
            self._arrived.clear()
        self._abort_batch.clear()
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        requests = [waiting.request for waiting in batch]
        started = time.perf_counter()
        try:
            # In a thread, so that requests keep coming in meanwhile.
            completions = await asyncio.to_thread(self._generator.generate, requests, self._abort_batch.is_set)
        except Exception as error:
            for waiting in batch:
                waiting.fail(error)
            return
        logger.debug("%d requests in %.3f s", len(batch), time.perf_counter() - started)
        for waiting, completion in zip(batch, completions, strict=True):
            waiting.succeed(self._output(completion))

    def _output(self, completion: Completion) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            stop_reason="completed" if completion.finished else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": self._weights_version},
        )


def _build_generator(config: RolloutConfig, model_config: HFModelConfig) -> PromptSharingGenerator:
    from verl.utils.model import get_hf_auto_model_class

    auto_class = get_hf_auto_model_class(model_config.hf_config)
    model = auto_class.from_pretrained(
        model_config.local_path,
        config=model_config.hf_config,
        dtype=PrecisionType.to_dtype(config.dtype),
        trust_remote_code=model_config.trust_remote_code,
    )
    tokenizer = model_config.tokenizer
    ends = {tokenizer.eos_token_id}
    configured = getattr(model_config.generation_config, "eos_token_id", None)
    ends.update(configured if isinstance(configured, list) else [configured])
    ends.discard(None)
    return PromptSharingGenerator(model, sorted(ends), kept_tokens=config.max_num_batched_tokens)
