"""The two ends of `rollout.name=hf` in verl: the replica that launches a server, and the sender of weights to it."""

import os
from collections.abc import AsyncIterable, Iterable

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from zorro_verl.cpu_runtime.server import HFServer


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The Ray name under which the weight sender finds the server of a replica."""
    return f"hf_server_{replica_rank}{suffix}"


class HFReplica(RolloutReplica):
    """One server process a replica, whatever its tensor-parallel size, on the node of the replica's first worker."""

    async def launch_servers(self) -> None:
        if self.is_reward_model or self.is_teacher_model or self.rollout_mode is RolloutMode.COLOCATED:
            raise ValueError(
                "rollout.name=hf serves the policy that is trained, not a reward model or a teacher: "
                "choose another rollout.name there"
            )
        if self.config.logprobs_mode != "processed_logprobs":
            raise ValueError(
                "rollout.name=hf returns log-probabilities of the distribution drawn from: "
                f"rollout.logprobs_mode must be processed_logprobs, got {self.config.logprobs_mode}"
            )
        node = await self.workers[0].__ray_call__.remote(lambda worker: ray.get_runtime_context().get_node_id())
        name = server_name(self.replica_rank, self.name_suffix)
        server = (
            ray.remote(HFServer)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(self.config, self.model_config, self.replica_rank)
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name


class HFWeightSender(BaseRollout):
    """Lives in each worker of a replica, and the first of them sends the weights to the replica's server.

    The workers are those of the actor, or, in a rollout of its own, those that receive the actor's weights.
    """

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        width = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        width *= self.config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // width if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % width == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **adapter,
    ) -> None:
        """Gather the weights, which every rank takes part in, and load them into the server before returning."""
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=hf takes whole tensors, got wire_format={wire_format}: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive, with trainer_mode=separate_async gloo"
            )
        gathered = {}
        async for name, weight in ensure_async_iterator(weights):
            if self.is_leader_rank:
                # Copied: the next parameter that is gathered may reuse the memory of this one.
                gathered[name] = weight.detach().cpu().clone()
        if self.is_leader_rank:
            server = ray.get_actor(server_name(self.replica_rank))
            await server.load_weights.remote(gathered, global_steps)
