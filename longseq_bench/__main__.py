"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from longseq_bench.cli import run
    except KeyboardInterrupt:
        sys.exit(130)

    code = run(sys.argv[1:])
    if code == 130:
        import signal

        # a second Ctrl-C would end what is cleaned up at the exit with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    import gc

    # the interpreter would search all records for cycles before it ends: 0.5 s for 100,000
    gc.disable()
    sys.exit(code)


if __name__ == "__main__":
    main()
