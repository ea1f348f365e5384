"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from longseq_bench.cli import run
        from longseq_bench.cli.stdout import open_missing_streams
        from longseq_bench.launchers.interrupts import interrupt_on_termination
    except KeyboardInterrupt:
        sys.exit(130)
    open_missing_streams()
    interrupt_on_termination()
    code = run(sys.argv[1:])
    if code > 128:  # interrupted
        import signal

        # a second Ctrl-C would end what is cleaned up at the exit with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # an interrupt during an `exec` of text, such as in dataclasses, leaves a mark, for which
        # `python -m` ends by SIGINT whatever the exit code; another `exec` removes it
        exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
