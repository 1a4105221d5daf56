"""The two ends of `rollout.name=hf` in verl: the replica that launches a server, and the actor's sender of weights."""

import os
from collections.abc import Iterable

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from zorro_verl.cpu_runtime.server import HFServer


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The Ray name under which the weight sender finds the server of a replica."""
    return f"hf_server_{replica_rank}{suffix}"


class HFReplica(RolloutReplica):
    """One server process a replica, whatever its tensor-parallel size, on the node of the replica's first worker."""

    async def launch_servers(self) -> None:
        if self.rollout_mode is not RolloutMode.HYBRID:
            raise ValueError(
                "rollout.name=hf serves the actor's own workers (trainer.v1.trainer_mode=sync or colocate_async), "
                f"not a rollout of mode {self.rollout_mode.value}: choose another rollout.name there"
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
    """Lives in each worker of the actor; the first of a replica sends the weights to the replica's server."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        width = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        width *= self.config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self._replica_rank = rank // width if replica_rank == -1 else replica_rank
        self._is_sender = rank % width == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **adapter,
    ) -> None:
        """Gather the weights, which every rank takes part in, and load them into the server before returning."""
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=hf takes whole tensors, got wire_format={wire_format}: "
                "set actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        gathered = {}
        for name, weight in weights:
            if self._is_sender:
                # Copied: the next parameter that is gathered may reuse the memory of this one.
                gathered[name] = weight.detach().cpu().clone()
        if self._is_sender:
            server = ray.get_actor(server_name(self._replica_rank))
            await server.load_weights.remote(gathered, global_steps)
