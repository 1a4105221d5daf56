"""Nodes of a Ray cluster that lack this package, or have another version of it, are named before anything is started.

Five real Ray nodes on loopback, each with a Python of its own.
"""

import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import cluster
import network
import pytest
from fresh_process import run_python
from tiny_run import make_material, overrides
from trainer_process import temporary_ray_folder

import zorro_verl

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

VERSION = zorro_verl.__version__
HEAD, EQUAL, NONE, OLDER, BROKEN = (f"127.0.0.{n}" for n in range(2, 7))
CHECK = """
import logging, os
import ray
from zorro_verl.nodes import check_once_connected

logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
connect = ray.init
if "ALONE" in os.environ:
    ray.remote = None  # whoever makes a task fails
check_once_connected()
try:
    ray.init(log_to_driver=False, logging_level="ERROR")
    print("CONNECTED")
except ValueError as error:
    print("REFUSED", error)
assert ray.init is connect
"""


def python_without_this_package(folder):
    """A virtual environment with links to this one's packages; returns its interpreter and its packages' folder."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if "zorro" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python", packages


def add_distribution(packages, name, version, entry_points=""):
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    """The interpreter of each node, by its address."""
    folder = tmp_path_factory.mktemp("pythons")
    plug_in = "[verl.plugins]\nzorro = zorro_verl.plugin\n"
    none, _ = python_without_this_package(folder / "none")

    older, packages = python_without_this_package(folder / "older")
    add_distribution(packages, "zorro_verl", "0.0.9", plug_in)
    (packages / "zorro_verl").symlink_to(Path(zorro_verl.__file__).parent)

    broken, packages = python_without_this_package(folder / "broken")
    add_distribution(packages, "zorro_verl", VERSION, plug_in)
    (packages / "zorro_verl").mkdir()
    (packages / "zorro_verl" / "plugin.py").write_text("raise RuntimeError('half an upgrade')")
    for torch in packages.glob("torch-*.dist-info"):
        torch.unlink()
    add_distribution(packages, "torch", "2.0.0")
    return {EQUAL: Path(sys.executable), NONE: none, OLDER: older, BROKEN: broken}


class Growing:
    """A Ray cluster that starts with its head alone; `add` starts more nodes."""

    def __init__(self, stack, folder):
        self.stack, self.folder = stack, folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_"))}
        self.variables = cluster.with_token(inherited | {"OMP_NUM_THREADS": "1"})
        self.head = self._node(HEAD, None, Path(sys.executable))
        self.head.start()

    def add(self, pythons):
        nodes = [self._node(address, self.head.address, python) for address, python in pythons.items()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(cluster.Node.start, nodes))

    def drive(self, *arguments, **variables):
        """The exit code and the output of Python as a driver, not in this folder: workers may import from there."""
        driver = subprocess.run(
            [sys.executable, *arguments],
            env=self.variables | {"RAY_ADDRESS": self.head.address} | variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
        )
        return driver.returncode, driver.stdout

    def check(self, **variables):
        """What the check says in a driver of its own."""
        code, output = self.drive("-c", CHECK, **variables)
        assert code == 0, output
        return output

    def _node(self, address, head, python):
        place = network.Place(address, "lo", (), "")
        node = cluster.Node(place, 1, head, python, self.variables, self.folder / address.rpartition(".")[2])
        self.stack.callback(node.kill)
        return node


@pytest.fixture(scope="module")
def answers(pythons, tmp_path_factory):
    """What is said of one node, of two equal ones, and of five; and the trainer's exit code and output on the five."""
    with temporary_ray_folder() as folder, ExitStack() as stack:
        growing = Growing(stack, folder)
        alone = growing.check(ALONE="1")
        growing.add({EQUAL: pythons[EQUAL]})
        equal = growing.check()
        growing.add({address: python for address, python in pythons.items() if address != EQUAL})
        five = growing.check()
        material = make_material(tmp_path_factory.mktemp("material"))
        arguments = [*overrides(material, "zorro", ranks=1), "trainer.nnodes=4", f"hydra.run.dir={material}/hydra"]
        trainer = growing.drive("-m", "verl.trainer.main_ppo", *arguments, HYDRA_FULL_ERROR="1", HF_HUB_OFFLINE="1")
    return {"alone": alone, "equal": equal, "five": five, "trainer": trainer}


def test_a_single_node_is_asked_nothing(answers):
    assert "CONNECTED" in answers["alone"]


def test_nothing_is_said_of_equal_nodes(answers):
    assert "CONNECTED" in answers["equal"]
    assert "zorro" not in answers["equal"]


def test_each_node_that_differs_is_named_with_what_it_has(answers):
    refusal = next(line for line in answers["five"].splitlines() if line.startswith("REFUSED"))
    assert f"expected zorro-verl {VERSION}" in refusal
    assert f"{NONE} has none" in refusal
    assert f"{OLDER} has 0.0.9" in refusal
    assert f"{BROKEN} has {VERSION}, which can't be loaded (RuntimeError: half an upgrade)" in refusal
    assert f"pip install zorro-verl=={VERSION}" in refusal
    assert HEAD not in refusal
    assert EQUAL not in refusal


def test_another_torch_is_a_warning(answers):
    warnings = [line for line in answers["five"].splitlines() if line.startswith("zorro_verl.nodes WARNING")]
    assert len(warnings) == 1
    assert f"the Ray node {BROKEN} has torch 2.0.0, and the driver " in warnings[0]


def test_the_trainer_ends_before_it_starts_anything(answers):
    code, output = answers["trainer"]
    assert code == 1, output
    assert output.splitlines()[-1].startswith("ValueError: strategy=zorro expected zorro-verl"), output
    assert "(TaskRunner" not in output
    assert "(WorkerDict" not in output


def test_runs_with_another_strategy_are_left_alone(tmp_path):
    make_material(tmp_path)
    output = run_python(
        """
        import os
        import ray
        from hydra import compose, initialize_config_module
        from verl.utils.device import auto_set_device

        connect, model = ray.init, f"actor_rollout_ref.model.path={os.environ['MODEL']}"
        with initialize_config_module("verl.trainer.config", version_base=None):
            for strategy in ("fsdp2", "zorro"):
                config = compose("ppo_trainer", [model, f"actor_rollout_ref.actor.strategy={strategy}"])
                auto_set_device(config)
                print(strategy, ray.init is connect)
        """,
        MODEL=str(tmp_path / "model"),
    )
    assert "fsdp2 True" in output
    assert "zorro False" in output
