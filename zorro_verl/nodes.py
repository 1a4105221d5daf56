"""Before anything is started on several Ray nodes: each has the packages that the driver has.

Ray starts verl's task runner on any node with a free CPU, and workers wherever a slot is free. Without this package a
worker fails late, with "Unknown backend: zorro", and a task runner cuts groups without a word. With another version of
it, ranks may disagree on how a batch is split, and wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zorro_verl.wrapping import wrap_once

logger = logging.getLogger(__name__)

OURS, PLUG_IN = "zorro-verl", "plug-in"
OTHERS = ("verl", "torch", "transformers")  # Ray compares itself and Python
SECONDS = 120  # for a worker process to start on every node


def check_once_connected() -> None:
    """Check this process's Ray cluster: now, or when the next ``ray.init`` has connected to it."""
    import ray

    if ray.is_initialized():
        check_nodes()
    else:
        wrap_once(ray, "init", _checking)


def _checking(connect: Callable) -> Callable:
    def init(*args, **kwargs):
        import ray

        context = connect(*args, **kwargs)
        ray.init = connect  # this run's, and no other's
        check_nodes()
        return context

    return init


def check_nodes() -> None:
    """Ask each other node what is installed there; on a single node this is no work at all.

    Another verl, torch or transformers is a warning, as builds may differ on purpose, and so is a node that doesn't
    answer in time, or is lost meanwhile. A node without CPUs gets none of verl's processes and is not asked.

    Raises:
        ValueError: a node's zorro-verl is missing, can't be loaded, or has another version than this process's.
    """
    import ray

    nodes = _other_nodes(ray)
    if not nodes:
        return
    expected, found = _reader()(), dict(_ask(ray, nodes))
    for node, packages in found.items():
        for name in OTHERS:
            if packages[name] != expected[name]:
                logger.warning(
                    "the Ray node %s has %s %s, and the driver %s", nodes[node], name, packages[name], expected[name]
                )
    wrong = [f"{nodes[node]} has {_described(each)}" for node, each in found.items() if _wrong(each, expected)]
    if wrong:
        raise ValueError(
            f"strategy=zorro expected {OURS} {expected[OURS]}, which the driver has, on every node of the Ray cluster, "
            f"but {'; '.join(wrong)}: run `pip install {OURS}=={expected[OURS]}` there, in the Python of `ray start`"
        )


def _wrong(packages: Mapping[str, str | None], expected: Mapping[str, str | None]) -> bool:
    return (packages[OURS], packages[PLUG_IN]) != (expected[OURS], None)


def _described(packages: Mapping[str, str | None]) -> str:
    if packages[PLUG_IN] is None:
        return packages[OURS] or "none"
    return f"{packages[OURS]}, which can't be loaded ({packages[PLUG_IN]})"


def _other_nodes(ray: Any) -> dict[str, str]:
    """The address, by its id, of each node that Ray may start one of verl's processes on, but this process's own."""
    here = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0 and node["NodeID"] != here
    }


def _ask(ray: Any, nodes: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Each node's id and what is installed there. A node that was lost or takes too long is a warning instead."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_reader())
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
        for node in nodes
    }
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS)
    for answer in late:
        logger.warning("the Ray node %s did not say within %d s what is installed there", nodes[asked[answer]], SECONDS)
        ray.cancel(answer, force=True)
    for answer in answered:
        try:
            yield asked[answer], ray.get(answer)
        except ray.exceptions.RayError as error:
            logger.warning("the Ray node %s could not be asked: %s", nodes[asked[answer]], type(error).__name__)


def _reader() -> Callable[[], dict[str, str | None]]:
    """What reads the versions of one Python, None for a package that it lacks, and why the plug-in fails, if it does.

    Ray sends this function whole. It would look a module's function up there, where the module may be missing.
    """

    def packages() -> dict[str, str | None]:
        import contextlib
        from importlib.metadata import PackageNotFoundError, entry_points, version

        found: dict[str, str | None] = dict.fromkeys((OURS, *OTHERS, PLUG_IN))
        for name in (OURS, *OTHERS):
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
        for entry_point in entry_points(group="verl.plugins", name="zorro"):
            try:
                entry_point.load()
            except Exception as error:  # whatever it is, the driver is to say it
                found[PLUG_IN] = f"{type(error).__name__}: {error}"
        return found

    return packages
