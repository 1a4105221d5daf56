"""Run a function in spawned gloo processes, with a time limit."""

import os
import socket
import traceback

import torch
import torch.multiprocessing as mp


def run_ranks(function, world_size, *args, timeout=120):
    """``function(rank, *args)`` in ``world_size`` processes of one gloo group on verl's CPU platform.

    Returns what each rank returned, in order; raises what the first failing rank raised, as text.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, queue, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = [queue.get(timeout=timeout) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    failures = [text for _, text, _ in results if text]
    assert not failures, "\n".join(failures)
    return [result for _, _, result in sorted(results, key=lambda r: r[0])]


def _rank(function, rank, world_size, port, queue, args):
    os.environ.update(
        VERL_PLATFORM="cpu",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("cpu:gloo", rank=rank, world_size=world_size)
        result = function(rank, *args)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        queue.put((rank, None, result))
    except BaseException:
        queue.put((rank, f"rank {rank}:\n{traceback.format_exc()}", None))
