"""One Ray cluster of two nodes: each is a `ray start` in its place, with its own mark by which its processes are found.

Ray's own `ray stop` would end every Ray on the machine, so nodes are ended by the ids of their processes.
"""

import secrets
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from network import Place
from trainer_process import RUN_MARK, processes_marked, temporary_ray_folder

CPUS = 16  # logical, and more than veRL's actors reserve on a node
OBJECT_STORE = 256 * 2**20  # bytes


class NodeFailed(RuntimeError):
    """A node could not be started."""


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@dataclass(frozen=True)
class Node:
    """A Ray node that can be started, killed and started again.

    Attributes:
        place: its IP, and how to run a command there.
        slots: logical accelerator slots, one rank each.
        head: the address of the cluster's head, None for the head itself.
        python: the interpreter of `ray start` and of all workers of the node.
        variables: the environment that they inherit.
        folder: Ray's sessions and sockets.
        port: of a head, at which others join.
        mark: in the environment of all its processes.
    """

    place: Place
    slots: int
    head: str | None
    python: Path
    variables: Mapping[str, str]
    folder: Path
    port: int = field(default_factory=free_port)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def address(self) -> str:
        """Under which others join, where this node is the head."""
        return f"{self.place.address}:{self.port}"

    def start(self) -> None:
        """Returns when the node is part of the cluster.

        Raises:
            NodeFailed: `ray start` failed; the message is what it printed.
        """
        role = f"--address={self.head}" if self.head else f"--head --port={self.port} --include-dashboard=false"
        command = [
            *self.place.enter,
            *(str(self.python), "-m", "ray.scripts.scripts", "start"),
            *role.split(),
            f"--node-ip-address={self.place.address}",
            f"--num-gpus={self.slots}",
            f"--num-cpus={CPUS}",
            f"--object-store-memory={OBJECT_STORE}",
            f"--temp-dir={self.folder}",
            "--disable-usage-stats",
        ]
        started = subprocess.run(
            command,
            # Gloo looks its address up by the host's name, which many machines resolve to loopback.
            env={**self.variables, RUN_MARK: self.mark, "GLOO_SOCKET_IFNAME": self.place.device},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if started.returncode != 0:
            raise NodeFailed(f"{' '.join(command)} failed:\n{started.stdout}{started.stderr}")

    def processes(self) -> list[psutil.Process]:
        """Of this node, Ray's workers included."""
        return processes_marked(self.mark)

    def kill(self) -> int:
        """Ends all of its processes at once, as when a machine loses power; returns how many."""
        killed = 0
        while alive := self.processes():  # a raylet may have started one more meanwhile
            for process in alive:
                with suppress(psutil.NoSuchProcess):  # it ended with its raylet
                    process.kill()
            killed += len(alive)
            psutil.wait_procs(alive, timeout=10)
        return killed

    def ranks(self) -> list[int]:
        """Of the trainer's workers that are here now."""
        return sorted(rank for process in self.processes() if (rank := _rank(process)) is not None)


def _rank(process: psutil.Process) -> int | None:
    """Of a process of veRL's worker group; None for every other."""
    try:
        if " ".join(process.cmdline()).startswith("ray::WorkerDict"):
            return int(process.environ()["RANK"])
    except psutil.NoSuchProcess:
        return None  # ended meanwhile
    return None


def with_token(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment whose Ray clusters let in nobody but who has the same.

    Without it Ray asks for a token on machines that have one in `~/.ray/auth_token`, and for none on others.
    """
    return {**variables, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def two_nodes(
    places: tuple[Place, Place], slots: int, variables: Mapping[str, str], second_python: Path = Path(sys.executable)
) -> Iterator[tuple[Node, Node]]:
    """A started head and a started second node; afterwards no process and no folder of either is left.

    Args:
        places: of head and second node.
        slots: on each node.
        variables: the environment of both.
        second_python: the second node's interpreter; the head has this program's.
    """
    with temporary_ray_folder() as folder:
        head = Node(places[0], slots, None, Path(sys.executable), variables, folder / "a")
        second = Node(places[1], slots, head.address, second_python, variables, folder / "b")
        try:
            head.start()
            second.start()
            yield head, second
        finally:
            try:
                second.kill()
            finally:
                head.kill()
