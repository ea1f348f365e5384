"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from longseq_bench.cli import run
    except KeyboardInterrupt:
        sys.exit(130)

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
