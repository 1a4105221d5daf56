"""One seed for each request, so that neither the order of requests nor the make-up of a batch decides what is drawn.

verl's agent loop names its requests at random, and its load balancer spreads them over the servers as they come. What
is fixed is the place of a rollout in the step: the step, the prompt's index in the dataset, and the number of the
session among the `rollout.n` of its prompt. They go into the request's sampling parameters as `seed`; the server mixes
in the prompt's tokens. Two runs with the same `rollout.seed`, data and weights therefore draw the same tokens for the
same row of the batch, whatever strategy trains the actor. What is left is rounding: a batch of another make-up can
change a probability in its last bits, and with it a draw that falls within them.
"""

import hashlib
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from zorro_verl.wrapping import wrap_once


def rollout_seed(run_seed: int, *place: object) -> int:
    """The seed of the rollout at `place` of a run, from the text of its parts."""
    return _digest("/".join(str(part) for part in (run_seed, *place)).encode())


def request_seed(seed: int, prompt: Sequence[int]) -> int:
    """The seed of one generation: a rollout of several turns sends several requests under the same `seed`."""
    return _digest(str((seed, *prompt)).encode())


def uniforms(seed: int, count: int) -> torch.Tensor:
    """`count` float64 numbers in [0, 1); the first k of them are the same for every count >= k."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seed_requests(agent_loop: ModuleType) -> None:
    """Put the seed into the sampling parameters where verl starts the agent loop of one rollout."""
    wrap_once(agent_loop.AgentLoopWorker, "_run_agent_loop", _seeded)


def _seeded(original: Callable) -> Callable:
    async def _run_agent_loop(self, sampling_params, trajectory, **sample):
        if self.rollout_config.name == "hf":
            place = [trajectory[part] for part in ("step", "validate", "sample_index", "rollout_n")]
            # V1 numbers the sessions of a prompt, V0 the rows of the batch.
            place.append(sample.get("session_id", sample.get("priority")))
            sampling_params = {**sampling_params, "seed": rollout_seed(self.rollout_config.seed, *place)}
        return await original(self, sampling_params, trajectory, **sample)

    return _run_agent_loop


def _digest(text: bytes) -> int:
    # 63 bits: what a torch.Generator takes.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
