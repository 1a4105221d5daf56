"""Which nodes of a Ray cluster are asked what they have, and what becomes of one that can't answer."""

import pytest
from fresh_process import run_python

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

CLUSTER = """
import logging
import os
import time

import ray
from ray.cluster_utils import Cluster

from zorro_verl import nodes

logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
node = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 1})


def add(cpus):
    return cluster.add_node(num_cpus=cpus, object_store_memory=80 * 2**20)


asked, without_cpus, gone = add(1), add(0), add(1)
try:
    nodes.check_once_connected()
    context = ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    print("CONTEXT", context.address_info["node_id"] == ray.get_runtime_context().get_node_id())
    cluster.remove_node(gone, allow_graceful=False)
    while sum(each["Alive"] for each in ray.nodes()) > 3:
        time.sleep(0.2)
    print("ASKED", set(nodes._other_nodes(ray)) == {asked.node_id})

    @ray.remote(num_cpus=1)
    def busy():
        time.sleep(300)

    held = [busy.remote() for _ in range(2)]  # every CPU
    while ray.available_resources().get("CPU", 0):
        time.sleep(0.2)
    nodes.SECONDS = 30
    nodes.check_once_connected()  # connected already: now
    print("BUSY asked")
    for answer in held:
        ray.cancel(answer, force=True)

    def reader(there):
        here = os.getpid()

        def packages():
            import os

            if os.getpid() != here:
                there()
            return {"zorro-verl": "1", "verl": "1", "torch": "1", "transformers": "1", "plug-in": None}

        return lambda: packages

    nodes._reader = reader(lambda: os._exit(1))
    nodes.check_once_connected()
    print("DIED went on")
    nodes._reader, nodes.SECONDS = reader(lambda: time.sleep(300)), 3
    nodes.check_nodes()
    print("LATE went on")
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.fixture(scope="module")
def said():
    return run_python(CLUSTER)


def test_living_nodes_with_cpus_are_asked(said):
    assert "ASKED True" in said


def test_init_gives_what_rays_own_gives(said):
    assert "CONTEXT True" in said


def test_a_cluster_that_is_connected_is_asked_at_once_even_if_it_is_busy(said):
    assert "BUSY asked" in said
    assert "did not say" not in said.partition("BUSY asked")[0]


def test_a_node_whose_worker_dies_is_a_warning(said):
    assert "could not be asked: WorkerCrashedError" in said
    assert "DIED went on" in said


def test_a_node_that_is_late_is_a_warning(said):
    assert "did not say within 3 s" in said
    assert "LATE went on" in said
