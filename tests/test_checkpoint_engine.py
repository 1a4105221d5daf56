"""The way of the weights to rollout servers of their own: verl's protocol of a checkpoint engine, over gloo."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from zorro_verl.cpu_runtime import checkpoint_engine
from zorro_verl.cpu_runtime.checkpoint_engine import GlooCheckpointEngine

ACTORS, ROLLOUTS = 2, 2


def weights_of(update):
    """Several dtypes, one unknown to gloo, a scalar, nothing, a view that is not contiguous, one above the bucket."""
    generator = torch.Generator().manual_seed(update)
    return {
        "large": torch.randn(300, 1000, generator=generator),
        "half": torch.randn(7, 3, generator=generator).bfloat16(),
        "view": torch.randn(5, 4, generator=generator).T,
        "scalar": torch.tensor(float(update)),
        "counter": torch.tensor([update, 2**40]),
        "eighth": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
        "nothing": torch.empty(0, 3),
    }


@pytest.mark.timeout(120)
def test_every_rollout_worker_gets_the_weights_of_each_update(monkeypatch):
    """As verl's `CheckpointEngineManager` does it, a thread for each process: an engine keeps all it has to itself."""
    monkeypatch.setattr(checkpoint_engine, "TIMEOUT", timedelta(seconds=20))
    actors = [GlooCheckpointEngine(bucket_size=1 << 20, is_master=rank == 0) for rank in range(ACTORS)]
    rollouts = [GlooCheckpointEngine(bucket_size=1 << 20) for _ in range(ROLLOUTS)]
    engines = actors + rollouts

    async def send(engine, update, gathered):
        def stream():
            for name, weight in weights_of(update).items():
                gathered.append(name)  # every rank of the actor takes part, or FSDP would wait for it
                yield name, weight

        await engine.send_weights(stream(), global_steps=update)

    async def receive(engine, update, received):
        async for name, weight in engine.receive_weights(global_steps=update):
            received.append((name, weight))

    for update in (1, 2):
        expected = weights_of(update)
        topology = GlooCheckpointEngine.build_topology(ACTORS, ROLLOUTS, [engine.prepare() for engine in engines])
        assert [{len(values) for values in group.values()} for group in topology] == [{ACTORS}, {ROLLOUTS}]
        arguments = [
            {name: values[place] for name, values in group.items()}
            for group, size in zip(topology, (ACTORS, ROLLOUTS), strict=True)
            for place in range(size)
        ]
        seen = [[] for _ in engines]

        def take_part(engine, arguments, seen, update=update):
            engine.init_process_group(**arguments)
            asyncio.run((send if engine in actors else receive)(engine, update, seen))

        with ThreadPoolExecutor(len(engines)) as pool:
            for part in [pool.submit(take_part, *each) for each in zip(engines, arguments, seen, strict=True)]:
                part.result()
        for engine in engines:
            engine.finalize()
        assert seen[:ACTORS] == [list(expected)] * ACTORS
        for received in seen[ACTORS:]:
            assert [name for name, _ in received] == list(expected)
            for name, weight in received:
                assert weight.dtype == expected[name].dtype
                assert torch.equal(weight.float(), expected[name].float()), name
