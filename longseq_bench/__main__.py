"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    from longseq_bench.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
