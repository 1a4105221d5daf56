"""A replay buffer for short steps: it looks for finished rollouts ten times a second and keeps the rows in data order.

    trainer.v1.sampler.custom_sampler.path=pkg://zorro_verl.cpu_runtime.replay
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer

verl's own looks every two seconds, which is most of a step on a small model, and lists rows in the order in which they
were finished, so that the same rollouts make up other mini-batches in each run.
"""

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.1


class OrderedReplayBuffer(ReplayBuffer):
    """verl's synchronous replay buffer with a short poll; rows by prompt as dispatched, then by session and turn."""

    def __init__(self, **kwargs):
        if kwargs["trainer_mode"] != "sync":
            raise ValueError(
                "OrderedReplayBuffer is a synchronous sampler: trainer.v1.trainer_mode must be sync, "
                f"got {kwargs['trainer_mode']}; leave trainer.v1.sampler.custom_sampler empty"
            )
        super().__init__(**{"poll_interval": POLL_SECONDS, **kwargs})

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot) -> KVBatchMeta:
        # The snapshot of the prompts keeps the order in which the trainer dispatched them.
        place = {uid: index for index, uid in enumerate(self.prompt_global_steps[partition_id])}

        def position(key: str) -> tuple[int, int, int]:
            uid, session, turn = key.rsplit("_", 2)
            return place.get(uid, len(place)), int(session), int(turn)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=position)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
