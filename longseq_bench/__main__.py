"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from longseq_bench.cli import run
        from longseq_bench.launchers.interrupts import ignore_interrupts, interrupt_on_termination

        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # an encoding may lack the symbols of tables
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        interrupt_on_termination()
        code = run(sys.argv[1:])
        ignore_interrupts()
    except KeyboardInterrupt:
        from longseq_bench.launchers.interrupts import ignore_interrupts

        ignore_interrupts()
        code = 130
    # an interrupt inside an exec, such as that of a dataclass, sets a flag of Python, by which
    # `python -m` ends by SIGINT whatever the exit code; the next exec takes it back
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
