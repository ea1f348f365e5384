"""Commands and options that are gone, and what to use instead."""

from collections.abc import Sequence

from longseq_bench.core.errors import UserError

_LIVE = (
    "--live is gone; while the sweep runs, `longseq report FOLDER --format html` makes a page of "
    "the records so far"
)
_PUBLISHED = (
    "{} is gone; write published lengths next to the table of `longseq report`, or make the table "
    "from `longseq report RESULTS --json`"
)
_HOSTS = "{} is gone; `longseq launch` runs once, in an allocation of Slurm or with --hosts a:8,b:8"
GONE: dict[str, str] = {
    "sweep --live": _LIVE,
    "sweep --port": _LIVE,
    "report --published": _PUBLISHED.format("--published"),
    "report --beside": _PUBLISHED.format("--beside"),
    **{
        f"launch {name}": _HOSTS.format(name)
        for name in ("--node-rank", "--rdzv-endpoint", "--rdzv-timeout", "--key-file")
    },
    "verify": "verify is gone; `longseq show RESULTS` names the broken lines",
    "compare --least": "--least is gone; write --min-difference",
    "compare --across": "--across is gone; write --across-machines",
    "plan --accuracy": "--accuracy is gone; the table of `longseq plan` has the past error of each "
    "row, and `longseq plan --json` all of them",
    "plan --sbatch": "--sbatch is gone; write a job that runs `longseq launch -- maxlen ...` in an "
    "allocation of `sbatch --nodes N`",
}
"""A command, or a command and its option, and the sentence that answers it."""


def check_gone(arguments: Sequence[str]) -> None:
    """Raise UserError for a command or an option that is gone.

    What follows `--`, as in `longseq launch -- sweep FILE`, is a command of its own.
    """
    command = ""
    for word in arguments:
        if word == "--":
            command = ""
            continue
        if not command and not word.startswith("-"):
            command = word
        key = word if word == command else f"{command} {word.partition('=')[0]}"
        if key in GONE:
            raise UserError(GONE[key])
