"""verl's checkpoint engine "gloo": weights from the trainer's processes to rollout servers of their own, over CPUs.

    trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.checkpoint_engine.backend=gloo

verl's own backends (nccl, nixl, mooncake) move weights between devices. Here the first rank of the actor broadcasts one
tensor at a time to the workers of all rollout replicas, in a gloo group that lives as long as one update.
"""

import pickle
from collections.abc import AsyncGenerator, Iterable
from datetime import timedelta
from typing import NamedTuple

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine

# As long as verl's own groups wait for a rank (actor_rollout_ref.nccl_timeout).
TIMEOUT = timedelta(seconds=600)

END = b""


class MeetingPoint(NamedTuple):
    """Where the members of one update's group find one another: the address of the sender's store."""

    host: str
    port: int


class GlooCheckpointEngine(CheckpointEngine):
    """One end of the way: the sender with `is_master`, else a receiver or an idle rank of the actor.

    `bucket_size`, which verl passes to every backend, has no meaning: a tensor is never split, and never two of them
    are held at once.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> MeetingPoint | None:
        """Open the store of the next update; the sender's answer says where it is."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        return MeetingPoint(host, self._store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[MeetingPoint | None]
    ) -> tuple[dict[str, list], dict[str, list]]:
        """Rank 0 for the first rank of the actor, none for its others, and the next ones for the rollout workers."""
        members = 1 + rollout_world_size

        def arguments(ranks: list[int | None]) -> dict[str, list]:
            return {"rank": ranks, "members": [members] * len(ranks), "meeting_point": [metadata[0]] * len(ranks)}

        return arguments([0] + [None] * (actor_wg_world_size - 1)), arguments(list(range(1, members)))

    def init_process_group(self, rank: int | None, members: int, meeting_point: MeetingPoint) -> None:
        """Join the group, unless this rank has no part in it."""
        if rank is None:
            return
        if not self._is_master:
            self._store = TCPStore(*meeting_point, is_master=False, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(self._store, rank, members, TIMEOUT)

    def finalize(self) -> None:
        self._group = self._store = None

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Broadcast every weight; ranks without a part in the group only help to gather them."""
        sent = 0
        for name, weight in weights:
            if self._group is None:
                continue
            weight = weight.detach().cpu().contiguous()
            self._store.set(_header(sent), pickle.dumps((name, weight.dtype, weight.shape)))
            self._broadcast(weight)
            sent += 1
        if self._group is not None:
            self._store.set(_header(sent), END)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Each weight as it comes, whole, with the sender's name, dtype and shape."""
        received = 0
        while (header := self._store.get(_header(received))) != END:
            name, dtype, shape = pickle.loads(header)
            weight = torch.empty(shape, dtype=dtype)
            self._broadcast(weight)
            yield name, weight
            received += 1

    def _broadcast(self, weight: torch.Tensor) -> None:
        # As bytes: gloo does not know every dtype.
        self._group.broadcast(weight.view(-1).view(torch.uint8), 0).wait()


def _header(index: int) -> str:
    return f"weight {index}"
