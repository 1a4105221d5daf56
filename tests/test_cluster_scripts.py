"""recipes/cluster: Ray on one machine of several, a recipe as a Slurm job, and on Kubernetes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import recipe as recipes
import yaml
from cluster import free_port
from trainer_process import RUN_MARK, processes_marked, temporary_ray_folder

CLUSTER = Path(__file__).parents[1] / "recipes" / "cluster"
RECIPE = CLUSTER.parent / "grpo_qwen3_32b_long_context.sh"
HEAD, WORKER = "127.0.0.2", "127.0.0.3"

# What a Slurm machine has, as far as slurm.sh calls it. Each writes down its call.
SCONTROL = """#!/bin/bash
printf 'n%d\\n' 1 2 3 4
"""
SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
# Python: a Ray that stays until it is told to end, and whose nodes are there once they have been started.
PYTHON = """#!/bin/bash
case $* in
    "-c import secrets"*) echo secret ;;
    "-c import ray"*) echo 10.0.0.1 ;;
    "-m ray.scripts.scripts start"*)
        echo "ray ${*:3}" >> "$CALLS"
        trap 'echo "ray ended" >> "$CALLS"; exit 143' TERM
        while true; do sleep 0.05; done ;;
    "- "*)
        [[ $3 == 1 ]] && started=--head || started=--address
        until grep -q -e "^ray start.* $started" "$CALLS"; do sleep 0.05; done
        echo "wait $2 $3" >> "$CALLS"
        [[ $3 == 1 ]] || exit "$JOINED" ;;
esac
"""
STUB_RECIPE = """#!/bin/bash
echo "recipe $* $RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN $NNODES $GPUS_PER_NODE" >> "$CALLS"
[[ -z $LASTS ]] || while true; do sleep 0.05; done
exit "$CODE"
"""


class SlurmJob:
    """slurm.sh in a folder of its own, among commands that write down their calls."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(CLUSTER, folder / "recipes" / "cluster")
        shutil.copy(CLUSTER / "slurm.sh", folder / "slurm_script")  # Slurm runs a copy
        (folder / "bin").mkdir()
        for name, text in {
            "bin/scontrol": SCONTROL,
            "bin/srun": SRUN,
            "bin/python": PYTHON,
            "recipes/one.sh": STUB_RECIPE,
        }.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "calls").touch()

    def start(self, joined=0, code=0, lasts=""):
        slurm = {
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_ID": "12",
            "SLURM_GPUS_ON_NODE": "8",
        }
        mine = {"CALLS": str(self.folder / "calls"), "JOINED": str(joined), "CODE": str(code), "LASTS": lasts}
        mine |= {"PYTHON": "python", "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        return subprocess.Popen(
            ["bash", self.folder / "slurm_script", "recipes/one.sh", "trainer.total_epochs=1"],
            cwd=self.folder,
            env=os.environ | slurm | mine,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, **options):
        """Its exit code and what was called, one line each."""
        process = self.start(**options)
        try:
            process.communicate(timeout=60)
        finally:
            end_session(process)
        return process.returncode, self.calls()

    def calls(self):
        return (self.folder / "calls").read_text().splitlines()


def end_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the script has left


@pytest.fixture
def job(tmp_path):
    return SlurmJob(tmp_path)


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", script], timeout=20).returncode == 0
    assert os.access(script, os.X_OK)


def test_a_slurm_job_starts_head_workers_and_the_recipe_once(job):
    code, calls = job.run()
    assert code == 0
    kinds = [re.match(r"srun|ray start .*(--head|--address)|ray ended|wait|recipe", call)[0] for call in calls]
    kinds = [kind.split()[0] + kind.split()[-1] if kind.startswith("ray start") else kind for kind in kinds]
    assert kinds == ["srun", "ray--head", "wait", "srun", "ray--address", "wait", "recipe", "ray ended", "ray ended"]
    head, workers = (call for call in calls if call.startswith("srun"))
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n1", "head"} <= set(head.split())
    assert {"--overlap", "--nodes=3", "--ntasks=3", "--exclude=n1", "worker", "n1"} <= set(workers.split())
    starts = [call.split() for call in calls if call.startswith("ray start")]
    assert all({"--num-gpus=8", "--block"} <= set(start) for start in starts)
    assert "--port=20012" in starts[0]
    assert "--address=n1:20012" in starts[1]
    assert [call for call in calls if call.startswith("wait")] == ["wait n1:20012 1", "wait n1:20012 4"]
    assert "recipe trainer.total_epochs=1 n1:20012 token secret 4 8" in calls


def test_a_slurm_job_hands_on_the_recipes_exit_code(job):
    code, calls = job.run(code=7)
    assert code == 7
    assert calls[-2:] == ["ray ended", "ray ended"]


def test_a_slurm_job_whose_nodes_do_not_join_runs_no_recipe(job):
    code, calls = job.run(joined=1)
    assert code == 1
    assert not [call for call in calls if call.startswith("recipe")]
    assert calls[-2:] == ["ray ended", "ray ended"]


def test_a_cancelled_slurm_job_ends_ray(job):
    process = job.start(lasts="yes")
    try:
        wait_until(lambda: any(call.startswith("recipe") for call in job.calls()))
        os.killpg(process.pid, signal.SIGTERM)  # scancel signals all processes of a job
        process.communicate(timeout=30)
    finally:
        end_session(process)
    assert process.returncode == 143
    assert job.calls().count("ray ended") == 2


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def test_kubernetes_and_slurm_agree_with_the_recipe():
    own = recipes.settings(recipes.command_line(RECIPE, {}))
    nodes, gpus = own["trainer.nnodes"], own["trainer.n_gpus_per_node"]
    cluster, job = yaml.safe_load_all((CLUSTER / "raycluster.yaml").read_text())

    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert {str(workers[key]) for key in ("replicas", "minReplicas", "maxReplicas")} == {nodes}
    assert workers["rayStartParams"]["num-gpus"] == gpus
    (worker,) = workers["template"]["spec"]["containers"]
    assert all(worker["resources"][key]["nvidia.com/gpu"] == gpus for key in ("limits", "requests"))
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["image"] == worker["image"]
    for pod, container in ((cluster["spec"]["headGroupSpec"], head), (workers, worker)):
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes
        assert mounts["shared"] == "/shared"
    assert mounts["shm"] == "/dev/shm"

    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    words = job["spec"]["entrypoint"].split()
    assert {f"NNODES={nodes}", f"GPUS_PER_NODE={gpus}"} <= set(words)
    assert words[-1] == f"/shared/recipes/{RECIPE.name}"

    sbatch = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE))
    assert (sbatch["nodes"], sbatch["gpus-per-node"], sbatch["ntasks-per-node"]) == (nodes, gpus, "1")


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_head_and_a_worker_find_each_other_and_end_with_the_script():
    """On two addresses of loopback, with a token of their own."""
    mark, secret, port = f"test-{os.getpid()}", "0" * 64, free_port()
    with temporary_ray_folder() as folder:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_"))}
        variables |= {
            "PYTHON": sys.executable,
            "PORT": str(port),
            "RAY_AUTH_TOKEN": secret,
            "INTERFACE": "lo",
            RUN_MARK: mark,
        }

        def start_ray(*arguments, **more):
            return subprocess.Popen(
                [CLUSTER / "start_ray.sh", *arguments],
                env=variables | more,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        def waited(nodes, seconds):
            process = start_ray("wait", HEAD, NNODES=str(nodes), WAIT=str(seconds))
            output, _ = process.communicate(timeout=150)
            return process.returncode, output

        common = ("--block", "--num-cpus=1", f"--object-store-memory={2**27}")
        try:
            head = start_ray(
                *("head", *common, f"--temp-dir={folder}/a", "--include-dashboard=false"),
                NODE_IP=HEAD,
                GPUS_PER_NODE="2",
            )
            assert waited(1, 120)[0] == 0
            worker = start_ray(*("worker", HEAD, *common, f"--temp-dir={folder}/b"), NODE_IP=WORKER, GPUS_PER_NODE="3")
            code, output = waited(2, 120)
            assert code == 0, output
            assert {HEAD, WORKER} <= set(output.split())
            code, output = waited(3, 1)
            assert code == 1
            assert f"expected 3 Ray nodes at {HEAD}:{port} within 1 s, got {HEAD}" in output.replace(WORKER, HEAD)
            environment = next(p.environ() for p in processes_marked(mark) if p.name() == "raylet")
            assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
            for process in (worker, head):
                process.terminate()
                process.communicate(timeout=60)
            wait_until(lambda: not processes_marked(mark), 30)
        finally:
            for process in processes_marked(mark):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.kill()


def test_a_machine_without_gpus_is_told_what_to_set(tmp_path):
    for name in ("bash", "env", "grep", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    process = subprocess.run(
        ["bash", CLUSTER / "start_ray.sh", "head"],
        env={"PATH": str(tmp_path), "NODE_IP": HEAD, "HOME": str(tmp_path), "PYTHON": "echo"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert process.stderr == "start_ray.sh: expected GPUs, nvidia-smi lists none: set GPUS_PER_NODE\n"
