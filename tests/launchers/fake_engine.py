"""A fake of srun, or of mpirun if it has that name: it starts the ranks on this host.

It labels their output, passes SIGUSR1 on, ends them at SIGTERM, and names those that died in the
engine's words. `install` puts it into a folder of programs, with a fake of scontrol for srun.
"""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

HOSTS = ("127.0.0.1", "127.0.0.2")

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "fake[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
}
"""Variables of an allocation of both hosts."""


def install(folder: Path) -> None:
    """Write programs srun, mpirun and scontrol into a folder for PATH."""
    code = f'#!/bin/sh\nexec {sys.executable} -P {__file__} {{name}} "$@"\n'
    hosts = "\\n".join(HOSTS)
    programs = {name: code.format(name=name) for name in ("srun", "mpirun")}
    programs["scontrol"] = f"#!/bin/sh\nprintf '{hosts}\\n'\n"
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)


def main(engine: str, *arguments: str) -> int:
    if engine == "srun":
        size = next(int(a.partition("=")[2]) for a in arguments if a.startswith("--ntasks="))
    else:
        size = int(arguments[arguments.index("-np") + 1])
    command = arguments[arguments.index(sys.executable) :]
    ranks = [start_rank(engine, rank, size, command) for rank in range(size)]
    signal.signal(signal.SIGUSR1, lambda *_: [rank.send_signal(signal.SIGUSR1) for rank in ranks])
    signal.signal(signal.SIGTERM, lambda *_: [rank.kill() for rank in ranks])
    copies = [
        threading.Thread(target=copy, args=(engine, number, source, target))
        for number, rank in enumerate(ranks)
        for source, target in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr))
    ]
    for thread in copies:
        thread.start()
    worst, known = 0, set[int]()
    while len(known) < size:
        for number, rank in enumerate(ranks):
            if number not in known and rank.poll() is not None:
                known.add(number)
                worst = max(worst, abs(rank.returncode))
                if rank.returncode and (engine == "srun" or len(known) == 1):
                    report(engine, number, rank.returncode, ranks)
        time.sleep(0.01)
    for thread in copies:
        thread.join()
    return worst


def start_rank(
    engine: str, rank: int, size: int, command: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    if engine == "srun":
        place = {"SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size}
        place["SLURM_LOCALID"] = rank % (size // 2)
    else:
        place = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size}
        place["OMPI_COMM_WORLD_LOCAL_RANK"] = rank % (size // 2)
    return subprocess.Popen(
        command, env=os.environ | {name: str(value) for name, value in place.items()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


def copy(engine: str, rank: int, source: IO[bytes], target: IO[str]) -> None:
    """Copy labelled lines; as mpirun, label also what follows a cut of a long line."""
    for line in source:
        label = f"{rank}: " if engine == "srun" else f"[1,{rank}]<stdout>:"
        pieces = [line] if engine == "srun" else [line[:300], line[300:]]
        for piece in filter(None, pieces):
            os.write(target.fileno(), label.encode() + piece)


def report(engine: str, rank: int, code: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Name a rank that died, as the engine does. mpirun ends the others first."""
    name = signal.strsignal(-code) if code < 0 else ""
    if engine == "srun":
        text = f"srun: error: n{rank + 1}: task {rank}: {name or f'Exited with exit code {code}'}\n"
    else:
        for other in ranks:
            other.kill()
        text = f"mpirun noticed that process rank {rank} with PID 12 on node n2 exited on "
        text += f"signal {-code} ({name}).\n"
    os.write(2, text.encode())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
