"""The rollout server as verl's agent loop sees it, the seed of each request, and the order of the rows."""

import asyncio
import threading
import types

import pytest
import torch
from fresh_process import run_python
from omegaconf import OmegaConf
from tiny_run import make_material
from verl.workers.config import HFModelConfig, RolloutConfig

from zorro_verl.cpu_runtime.routing import route_by_prompt
from zorro_verl.cpu_runtime.seeding import seed_requests
from zorro_verl.cpu_runtime.server import HFServer

PROMPTS = [[5, 9, 17, 4], [7, 7], [30, 12, 8, 8, 8, 41]]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    folder = make_material(tmp_path_factory.mktemp("material"))
    return HFModelConfig(path=str(folder / "model"), override_config={"attn_implementation": "sdpa"})


@pytest.fixture
def server(model_config):
    config = {"name": "hf", "dtype": "float32", "prompt_length": 16, "response_length": 8, "max_model_len": 20}
    return HFServer(RolloutConfig(**config), model_config, replica_rank=0)


def within_a_minute(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def ask(server, prompt, seed=None, **params):
    params = PARAMS | params | ({} if seed is None else {"seed": seed})
    return server.generate(prompt_ids=prompt, sampling_params=params, request_id="any", image_data=None)


def tokens(outputs):
    return [output.token_ids for output in outputs]


def test_requests_that_come_together_get_what_they_get_alone(server, model_config):
    async def together():
        return await asyncio.gather(*(ask(server, p, seed) for seed in range(4) for p in PROMPTS))

    async def alone():
        return [await ask(server, p, seed) for seed in reversed(range(4)) for p in reversed(PROMPTS)]

    outputs = within_a_minute(together())
    assert len({tuple(t) for t in tokens(outputs)}) == 12
    assert all(len(o.log_probs) == len(o.token_ids) and o.stop_reason == "completed" for o in outputs)
    server = HFServer(server._config, model_config, replica_rank=1)
    assert tokens(within_a_minute(alone()))[::-1] == tokens(outputs)


def test_requests_of_one_moment_are_one_batch(server):
    batches = []
    generate = server._generator.generate
    server._generator.generate = lambda requests, *stop: batches.append(len(requests)) or generate(requests, *stop)

    async def scenario():
        await asyncio.gather(*(ask(server, p, seed) for seed in range(6) for p in PROMPTS))

    within_a_minute(scenario())
    assert batches == [18]


def test_siblings_without_a_seed_differ_and_repeat_with_the_weights(server):
    async def scenario():
        weights = server._generator.model.state_dict()
        outputs = []
        for step in (1, 2, 2):
            await server.load_weights(weights, global_steps=step)
            outputs.append(await asyncio.gather(*(ask(server, PROMPTS[0]) for _ in range(4))))
        return outputs

    first, second, again = within_a_minute(scenario())
    assert len({tuple(t) for t in tokens(first)}) == 4
    assert tokens(second) == tokens(again) != tokens(first)
    assert [o.extra_fields["global_steps"] for o in (*first, *second)] == [1] * 4 + [2] * 4


def test_new_weights_reach_prompts_that_were_seen_before(server, model_config):
    other = HFServer(server._config, model_config, replica_rank=1)
    weights = {name: weight + 0.05 * weight.std() for name, weight in other._generator.model.state_dict().items()}

    async def scenario():
        before = await ask(server, PROMPTS[0], 0)
        await server.load_weights(weights, global_steps=1)
        await other.load_weights(weights, global_steps=1)
        return before, await ask(server, PROMPTS[0], 0), await ask(other, PROMPTS[0], 0)

    before, after, expected = within_a_minute(scenario())
    assert after == expected
    assert after.log_probs[0] != pytest.approx(before.log_probs[0], abs=1e-3)


def test_the_length_of_a_response_fits_the_config_and_the_context(server):
    async def scenario():
        outputs = [
            await ask(server, PROMPTS[0], 0, ignore_eos=True),
            await ask(server, PROMPTS[0], 0, ignore_eos=True, max_tokens=3),
            await ask(server, [5] * 15, 0, ignore_eos=True),
        ]
        with pytest.raises(ValueError, match="22 tokens leaves no room in the context of 20 .*max_prompt_length"):
            await ask(server, [5] * 22, 0)
        return [len(output.token_ids) for output in outputs]

    assert within_a_minute(scenario()) == [8, 3, 5]


def test_a_batch_that_fails_is_an_error_of_its_requests_and_not_of_the_server(server):
    async def scenario():
        forward = server._generator.model.forward
        server._generator.model.forward = None
        results = await asyncio.gather(*(ask(server, p, 0) for p in PROMPTS), return_exceptions=True)
        server._generator.model.forward = forward
        return results, await ask(server, PROMPTS[0], 0)

    failed, fine = within_a_minute(scenario())
    assert all(isinstance(error, TypeError) for error in failed)
    assert fine.token_ids


def test_a_request_that_its_caller_gives_up_does_not_stop_the_server(server):
    async def scenario():
        given_up = asyncio.create_task(ask(server, PROMPTS[0], 0))
        await asyncio.sleep(0)
        given_up.cancel()
        return await ask(server, PROMPTS[1], 0)

    assert within_a_minute(scenario()).token_ids


def test_what_the_server_cannot_do_is_refused(server):
    with pytest.raises(ValueError, match="text only.*image_data"):
        within_a_minute(server.generate(prompt_ids=[1], sampling_params=PARAMS, request_id="r", image_data=[object()]))
    with pytest.raises(ValueError, match="min_p"):
        within_a_minute(ask(server, PROMPTS[0], 0, min_p=0.1))


def test_aborted_requests_end_and_later_ones_wait_for_the_resumption(server):
    async def scenario():
        waiting = [asyncio.create_task(ask(server, p, 0)) for p in PROMPTS]
        await asyncio.sleep(0)
        await server.abort_all_requests()
        aborted = await asyncio.gather(*waiting)
        held = asyncio.create_task(ask(server, PROMPTS[0], 0))
        await asyncio.sleep(0.2)
        assert not held.done()
        await server.resume_generation()
        return aborted, await held, await ask(server, PROMPTS[0], 0)

    aborted, resumed, never_held = within_a_minute(scenario())
    assert [(o.stop_reason, o.token_ids) for o in aborted] == [("aborted", [])] * 3
    assert resumed == never_held
    assert resumed.stop_reason == "completed"


class Brake:
    """Holds the server's model at its call number `calls`, counted from 0, until it is released."""

    def __init__(self, server, calls):
        self._free, self._passed, self._held = calls, threading.Event(), threading.Event()
        server._generator.model.register_forward_pre_hook(self._before_call)

    def _before_call(self, module, args):
        if self._free == 0:
            self._held.set()
            assert self._passed.wait(30)
        self._free -= 1

    async def holds(self):
        assert await asyncio.to_thread(self._held.wait, 30)

    def release(self):
        self._passed.set()


def test_a_running_batch_ends_with_the_tokens_that_it_has_and_goes_on_from_them(server):
    """As verl's asynchronous client does it: it asks again with what it got, here under other weights."""
    brake = Brake(server, 5)  # three prompts, and two tokens behind the first
    weights = {name: weight * 1.1 for name, weight in server._generator.model.state_dict().items()}

    async def scenario():
        running = [asyncio.create_task(ask(server, p, 7, ignore_eos=True, max_tokens=8)) for p in PROMPTS]
        await brake.holds()
        aborting = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.1)
        assert not aborting.done()  # the call that has begun
        brake.release()
        await aborting
        first = await asyncio.gather(*running)
        await server.load_weights(weights, global_steps=5)
        await server.resume_generation()
        rest = [
            await ask(server, prompt + part.token_ids, 7, ignore_eos=True, max_tokens=8 - len(part.token_ids))
            for prompt, part in zip(PROMPTS, first, strict=True)
        ]
        return first, rest, server._generator.model

    first, rest, model = within_a_minute(scenario())
    for prompt, begun, ended in zip(PROMPTS, first, rest, strict=True):
        assert (begun.stop_reason, ended.stop_reason) == ("aborted", "completed")
        assert len(begun.token_ids) == len(begun.log_probs) == 4  # and one from the call that had begun
        assert len(ended.token_ids) == len(ended.log_probs) == 4
        assert ended.extra_fields["global_steps"] == 5
        row = torch.tensor([prompt + begun.token_ids + ended.token_ids])
        with torch.no_grad():
            log_p = model(row).logits[0, -5:-1].log_softmax(-1)
        own = log_p.gather(1, torch.tensor(ended.token_ids)[:, None])[:, 0]
        assert ended.log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_an_abort_while_prompts_are_computed_ends_before_the_next(server):
    brake = Brake(server, 1)  # the second of three prompts

    async def scenario():
        running = [asyncio.create_task(ask(server, p, 7)) for p in PROMPTS]
        await brake.holds()
        aborting = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.1)
        brake.release()
        await aborting
        return await asyncio.gather(*running)

    assert [(o.stop_reason, o.token_ids) for o in within_a_minute(scenario())] == [("aborted", [])] * 3


def test_an_abort_while_requests_are_collected_holds_the_next(server):
    async def scenario():
        first = asyncio.create_task(ask(server, PROMPTS[0], 0))
        await asyncio.sleep(0.005)  # of the time for more requests to come
        await server.abort_all_requests()
        held = asyncio.create_task(ask(server, PROMPTS[0], 0))
        await asyncio.sleep(0.3)
        assert not held.done()
        await server.resume_generation()
        return await first, await held

    first, held = within_a_minute(scenario())
    assert (first.stop_reason, held.stop_reason) == ("aborted", "completed")


def test_a_server_that_leaves_rejects_what_comes_late(server):
    """Held there, a request would wait for the next validation; the client takes it to another server."""

    async def scenario():
        await server.abort_all_requests(reject_request=True)
        late = await ask(server, PROMPTS[0], 0)
        await server.resume_generation()
        return late, await ask(server, PROMPTS[0], 0)

    late, served = within_a_minute(scenario())
    assert (late.stop_reason, late.token_ids) == ("aborted", [])
    assert served.stop_reason == "completed"


def test_a_held_request_is_drawn_from_the_weights_that_came_meanwhile(server):
    weights = {name: weight * 1.1 for name, weight in server._generator.model.state_dict().items()}

    async def scenario():
        await server.abort_all_requests()
        held = asyncio.create_task(ask(server, PROMPTS[0], 0))
        await asyncio.sleep(0.1)
        await server.load_weights(weights, global_steps=9)
        await server.resume_generation()
        return await held, await ask(server, PROMPTS[0], 0)

    held, after = within_a_minute(scenario())
    assert held == after
    assert held.extra_fields["global_steps"] == 9


def test_verls_asynchronous_client_puts_the_parts_together(server):
    """The whole loop of `FullyAsyncLLMServerClient`, its load balancer and Ray's handle apart."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    brake = Brake(server, 2)  # the prompt, and a token behind the first
    handle = types.SimpleNamespace(generate=types.SimpleNamespace(remote=server.generate))

    class Client(FullyAsyncLLMServerClient):
        async def _acquire_server(self, request_id, **request):
            return "server", handle

        def _release_server(self, server_id, request_id=None):
            pass

    client = Client(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "hf", "response_length": 8}}}))

    async def scenario():
        params = PARAMS | {"ignore_eos": True, "seed": 3}
        await server.load_weights(server._generator.model.state_dict(), global_steps=1)
        answer = asyncio.create_task(client.generate("any", prompt_ids=PROMPTS[0], sampling_params=params))
        await brake.holds()
        aborting = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.1)
        brake.release()
        await aborting
        await server.load_weights(server._generator.model.state_dict(), global_steps=2)
        await server.resume_generation()
        return await answer

    output = within_a_minute(scenario())
    assert len(output.token_ids) == len(output.log_probs) == 8
    assert output.extra_fields["min_global_steps"] == 1
    assert output.extra_fields["max_global_steps"] == 2
    row = torch.tensor([PROMPTS[0] + output.token_ids])
    with torch.no_grad():
        log_p = server._generator.model(row).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    own = log_p.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert output.log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_each_place_of_a_step_has_its_seed_and_only_for_this_server():
    seen = []

    class AgentLoopWorker:
        rollout_config = types.SimpleNamespace(name="hf", seed=42)

        async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **sample):
            seen.append(sampling_params.get("seed"))

    seed_requests(types.SimpleNamespace(AgentLoopWorker=AgentLoopWorker))
    worker = AgentLoopWorker()
    params = {"temperature": 1.0}

    def run(session=0, **place):
        trajectory = {"step": 1, "sample_index": 5, "rollout_n": 0, "validate": False} | place
        asyncio.run(worker._run_agent_loop(params, trajectory=trajectory, agent_name="any", session_id=session))
        return seen[-1]

    seeds = [run(), run(session=1), run(step=2), run(sample_index=6), run(rollout_n=1), run(validate=True)]
    assert len(set(seeds)) == 6
    assert run() == seeds[0]
    assert params == {"temperature": 1.0}
    worker.rollout_config.name = "vllm"
    assert run() is None


def test_siblings_go_to_one_server():
    named = []

    class LLMServerClient:
        config = types.SimpleNamespace(
            actor_rollout_ref=types.SimpleNamespace(rollout=types.SimpleNamespace(name="hf"))
        )

        async def _acquire_server(self, request_id, **request):
            named.append(request_id)

    route_by_prompt(types.SimpleNamespace(LLMServerClient=LLMServerClient))
    client = LLMServerClient()
    for request_id, prompt in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3])):
        asyncio.run(client._acquire_server(request_id, prompt_ids=prompt, sampling_params={}))
    assert named[0] == named[1] != named[2]
    client.config.actor_rollout_ref.rollout.name = "vllm"
    asyncio.run(client._acquire_server("own", prompt_ids=[1, 2]))
    assert named[-1] == "own"


@pytest.mark.ray
@pytest.mark.timeout(150)
def test_the_replay_buffer_lists_rows_in_data_order_and_soon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("q", numbered=True)
    output = run_python(
        f"""
        import threading, time
        import ray, torch
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from tensordict import TensorDict
        from verl.utils.import_utils import load_extern_type

        ray.init(num_cpus=4, include_dashboard=False, _temp_dir={str(folder)!r}, log_to_driver=False)
        tq.init(OmegaConf.create({{"backend": {{"SimpleStorage": {{"num_data_storage_units": 1}}}}}}))
        buffer = load_extern_type("pkg://zorro_verl.cpu_runtime.replay", "OrderedReplayBuffer")(
            trainer_mode="sync", trainer_config={{}}, max_off_policy_threshold=None, max_off_policy_strategy="drop",
            sampler_kwargs={{}}, refill_fn=None,
        )
        uids = [f"u{{i * 7 % 12}}-x" for i in range(12)]
        tags = [{{"is_prompt": True, "status": "pending", "global_steps": 1}} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        expected = [f"{{uid}}_{{session}}_{{turn}}" for uid in uids for session in range(11) for turn in range(2)]

        def finish():
            time.sleep(1)
            keys = [expected[i] for i in torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))]
            for chunk in (keys[:100], keys[100:]):
                fields = TensorDict({{"x": torch.zeros(len(chunk), 1)}}, batch_size=len(chunk))
                tq.kv_batch_put(keys=chunk, partition_id="train", fields=fields, tags=[{{"n": 1}}] * len(chunk))
            for uid in reversed(uids):
                tq.kv_put(key=uid, partition_id="train", tag={{"status": "finished"}})
            finished.append(time.perf_counter())

        finished = []
        thread = threading.Thread(target=finish)
        thread.start()
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=12)
        late = time.perf_counter() - finished[0]
        thread.join()
        assert batch.keys == expected, batch.keys
        assert late < 1.5, f"{{late}} s after the last rollout; verl's own buffer looks every 2 s"

        # The asynchronous one: of what is finished, the prompts that were dispatched first.
        tq.kv_clear(partition_id="train", keys=batch.keys)
        buffer = load_extern_type("pkg://zorro_verl.cpu_runtime.replay", "OrderedReplayBufferAsync")(
            trainer_mode="separate_async", trainer_config={{}}, max_off_policy_threshold=8,
            max_off_policy_strategy="drop", sampler_kwargs={{}}, refill_fn=None,
        )
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        finished = [uid for i, uid in enumerate(uids) if i % 3]
        keys = [f"{{uid}}_{{session}}_0" for session in range(4) for uid in reversed(finished)]
        fields = TensorDict({{"x": torch.zeros(len(keys), 1)}}, batch_size=len(keys))
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{{"n": 1}}] * len(keys))
        for uid in reversed(finished):
            tq.kv_put(key=uid, partition_id="train", tag={{"status": "finished"}})
        for first in (0, 4):
            batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=4)
            oldest = finished[first : first + 4]
            assert batch.keys == [f"{{uid}}_{{session}}_0" for uid in oldest for session in range(4)], batch.keys
        print("SAMPLED")
        tq.close()
        ray.shutdown()
        """,
        timeout=140,
    )
    assert "SAMPLED" in output


def test_each_replay_buffer_has_its_trainers():
    from zorro_verl.cpu_runtime.replay import OrderedReplayBuffer, OrderedReplayBufferAsync

    with pytest.raises(ValueError, match="trainer_mode=sync, got separate_async.*OrderedReplayBufferAsync"):
        OrderedReplayBuffer(trainer_mode="separate_async")
    with pytest.raises(ValueError, match="=colocate_async or separate_async, got sync.*OrderedReplayBuffer "):
        OrderedReplayBufferAsync(trainer_mode="sync")
