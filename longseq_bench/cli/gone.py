"""Commands and options that are gone, and what to use instead."""

from collections.abc import Sequence

from longseq_bench.core.errors import UserError

GONE = {
    "sweep --live --port": "while the sweep runs, `longseq report FOLDER --format html` makes a "
    "page of the records so far",
    "report --published --beside": "write published lengths next to the table of `longseq report`, "
    "or make the table from `longseq report RESULTS --json`",
    "launch --node-rank --rdzv-endpoint --rdzv-timeout --key-file": "`longseq launch` runs once, "
    "in an allocation of Slurm or with --hosts a:8,b:8",
    "verify": "`longseq show RESULTS` names the broken lines",
    "compare --least": "write --min-difference",
    "compare --across": "write --across-machines",
    "plan --accuracy": "the table of `longseq plan` has the past error of each row, and "
    "`longseq plan --json` all of them",
    "plan --sbatch": "write a job that runs `longseq launch -- maxlen ...` in an allocation of "
    "`sbatch --nodes N`",
}
"""A command, or a command and options of it, and what to use instead."""


def check_gone(arguments: Sequence[str]) -> None:
    """Raise UserError for a command or an option that is gone.

    What follows `--`, as in `longseq launch -- sweep FILE`, is a command of its own.
    """
    command = ""
    for word in arguments:
        if not command and not word.startswith("-"):
            command = word
        for names, remedy in GONE.items():
            name, *options = names.split()
            if command == name and word.partition("=")[0] in (options or [name]):
                raise UserError(f"{word.partition('=')[0]} is gone; {remedy}")
        command = "" if word == "--" else command
