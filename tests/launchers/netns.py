"""Two hosts made of network namespaces on one machine: an interface `eth` each, one cable between.

Needs Linux, iproute2 and root, to make namespaces; `unavailable_reason()` names what is missing.
Only the network is of its own: files and processes are this machine's.
"""

import os
import shutil
import signal
import subprocess
import uuid
from contextlib import suppress


def unavailable_reason() -> str | None:
    """Why no such hosts can be made here; None where they can. Tries it, in hundredths of a s."""
    if not shutil.which("ip"):
        return "no ip here (iproute2)"
    try:
        Hosts().close()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return None


class Hosts:
    """A pair of hosts with the addresses `addresses`, and a cable between them."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        subnet = f"10.77.{int(tag[:2], 16)}"
        self.names = [f"longseq-{tag}-{i}" for i in range(2)]
        self.addresses = [f"{subnet}.1", f"{subnet}.2"]
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            _do(
                "ip", "link", "add", "eth", "netns", self.names[0], "type", "veth",
                "peer", "name", "eth", "netns", self.names[1],
            )  # fmt: skip
            for name, address in zip(self.names, self.addresses, strict=True):
                _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth")
                _do("ip", "-n", name, "link", "set", "lo", "up")
                _do("ip", "-n", name, "link", "set", "eth", "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove both, and what still runs on them."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
