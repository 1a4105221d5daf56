"""Two places on this machine that reach each other by IP: network namespaces joined by a veth pair, else loopback.

A namespace lives as long as a process in it. Each is held by one `cat` that reads from this program: when this program
ends, however it ends, so does `cat`, and the kernel takes namespaces and veth pair away.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.99.0.1", "10.99.0.2")  # seen inside the two namespaces only
LOOPBACK = ("127.0.0.2", "127.0.0.3")  # for 127.0.0.1 Ray takes the machine's own IP


@dataclass(frozen=True)
class Place:
    """Where a node runs.

    Attributes:
        address: its IP.
        device: the network device that has it.
        enter: what a command is prefixed with to run there.
        namespace: the name that the kernel gives its network (`net:[4026532281]`).
    """

    address: str
    device: str
    enter: tuple[str, ...]
    namespace: str


class NotAllowed(RuntimeError):
    """This machine gives no network namespaces; the message is the kernel's or the command's."""


@contextmanager
def two_namespaces() -> Iterator[tuple[Place, Place]]:
    """Two places with a network of their own each; no packet leaves them.

    Raises:
        NotAllowed: neither root nor user namespaces may make one.
    """
    # Without root, a user namespace in which this user is root, and may therefore make networks.
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    with ExitStack() as held:
        first = held.enter_context(_namespace((), user))
        enter_first = _enter(first, user)
        second = held.enter_context(_namespace(enter_first, ()))
        enter_second = (*enter_first, "nsenter", f"--net=/proc/{second}/ns/net")
        _run(*enter_first, "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(second))
        places = []
        for pid, enter, device, address in zip(
            (first, second), (enter_first, enter_second), ("veth0", "veth1"), ADDRESSES, strict=True
        ):
            _run(*enter, "ip", "link", "set", "lo", "up")
            _run(*enter, "ip", "addr", "add", f"{address}/24", "dev", device)
            _run(*enter, "ip", "link", "set", device, "up")
            places.append(Place(address, device, enter, os.readlink(f"/proc/{pid}/ns/net")))
        yield places[0], places[1]


@contextmanager
def two_places(say: Callable[[str], None]) -> Iterator[tuple[Place, Place]]:
    """Two namespaces, or loopback where this machine gives none; `say` is told which."""
    with ExitStack() as stack:
        try:
            places = stack.enter_context(two_namespaces())
        except NotAllowed as error:
            say(f"no network namespaces here ({error}): both nodes are on loopback")
            places = loopback()
        else:
            say("each node has a network namespace of its own, and a veth pair joins them")
        yield places


def loopback() -> tuple[Place, Place]:
    """Two loopback addresses of this machine's own network."""
    namespace = os.readlink("/proc/self/ns/net")
    return Place(LOOPBACK[0], "lo", (), namespace), Place(LOOPBACK[1], "lo", (), namespace)


@contextmanager
def _namespace(enter: Sequence[str], user: Sequence[str]) -> Iterator[int]:
    """The id of a process that holds a new network namespace."""
    command = [*enter, "unshare", *user, "--net", "sh", "-c", "echo held; exec cat"]
    try:
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise NotAllowed(f"{error.filename} is not installed") from error
    with holder:  # which closes the pipe that it reads from, and waits for its end
        if holder.stdout.readline() != b"held\n":
            raise NotAllowed(holder.stderr.read().decode().strip())
        yield holder.pid


def _enter(pid: int, user: Sequence[str]) -> tuple[str, ...]:
    command = ("nsenter", f"--net=/proc/{pid}/ns/net")
    return (*command, f"--user=/proc/{pid}/ns/user", "--preserve-credentials") if user else command


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise NotAllowed(f"{error.filename} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotAllowed(f"{' '.join(command)}: {error.stderr.strip()}") from error
