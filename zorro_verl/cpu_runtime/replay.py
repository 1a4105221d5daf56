"""Replay buffers for short steps: they look for finished rollouts ten times a second and keep the rows in data order.

    trainer.v1.sampler.custom_sampler.path=pkg://zorro_verl.cpu_runtime.replay
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer         # OrderedReplayBufferAsync in the other modes

verl's own look every two seconds, which is most of a step on a small model, and list rows in the order in which they
were finished, so that the same rollouts make up other mini-batches in each run.
"""

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.1


class _InDataOrder(ReplayBuffer):
    """A short poll; rows by prompt as dispatched, then by session and turn."""

    def __init__(self, **kwargs):
        super().__init__(**{"poll_interval": POLL_SECONDS, **kwargs})

    def _places(self, partition_id) -> dict[str, int]:
        # The snapshot of the prompts keeps the order in which the trainer dispatched them.
        return {uid: index for index, uid in enumerate(self.prompt_global_steps[partition_id])}

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot) -> KVBatchMeta:
        place = self._places(partition_id)

        def position(key: str) -> tuple[int, int, int]:
            uid, session, turn = key.rsplit("_", 2)
            return place.get(uid, len(place)), int(session), int(turn)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=position)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)


class OrderedReplayBuffer(_InDataOrder):
    """verl's synchronous replay buffer with a short poll and rows in data order."""

    def __init__(self, **kwargs):
        _check_mode(type(self), kwargs["trainer_mode"], ("sync",))
        super().__init__(**kwargs)


class OrderedReplayBufferAsync(_InDataOrder, ReplayBufferAsync):
    """verl's asynchronous one, which takes what is finished first: of that, the prompts that were dispatched first."""

    def __init__(self, **kwargs):
        _check_mode(type(self), kwargs["trainer_mode"], ("colocate_async", "separate_async"))
        super().__init__(**kwargs)

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        # verl sorts a set by the step of its prompts, so that those of one step come as the set has them.
        place = self._places(partition_id)
        ordered = dict.fromkeys(sorted(sampleable_keys, key=lambda uid: place.get(uid, len(place))))
        return super()._select_prompt_uids(partition_id, ordered, batch_size)


def _check_mode(buffer: type, mode: str, modes: tuple[str, ...]) -> None:
    if mode not in modes:
        raise ValueError(
            f"{buffer.__name__} is a sampler for trainer.v1.trainer_mode={' or '.join(modes)}, got {mode}: set "
            "trainer.v1.sampler.custom_sampler.name to OrderedReplayBuffer (sync) or OrderedReplayBufferAsync, "
            "or leave custom_sampler empty"
        )
