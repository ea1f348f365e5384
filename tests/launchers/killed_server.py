"""Run by test_fork_server.py: kill a fork server without torch, and print what was seen as JSON."""

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver

from longseq_bench.launchers import fork_server
from longseq_bench.launchers.exit_status import OutputFile
from longseq_bench.launchers.local import LOADED, PRELOAD, _Child, _follow
from longseq_bench.launchers.rank_supervisor import RankSupervisor
from tests.make import trial


def main() -> None:
    forkserver.set_forkserver_preload([PRELOAD[0], LOADED])
    context = multiprocessing.get_context("forkserver")
    fork_server.ready()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=time.sleep, args=(60,))
    first = fork_server.start(child)
    sender.close()
    os.kill(first, signal.SIGKILL)
    supervisor = RankSupervisor(trial(), time.monotonic())
    _follow(supervisor, [_Child(child, receiver, OutputFile(), first)], print)
    os.kill(child.pid or 0, signal.SIGKILL)
    outcome = supervisor.outcome()

    exits = context.Process(target=os._exit, args=(255,))
    second = fork_server.start(exits)
    exits.join()
    json.dump(
        {
            "outcome": outcome.model_dump(mode="json"),
            "restarted": second != first,
            "code": exits.exitcode,
            "lost": fork_server.lost_with_server(exits, second),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
