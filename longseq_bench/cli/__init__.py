"""The command line: one file per command; errors become exit codes here and nowhere else.

0 done · 2 bad input · 3 a trial ended wrong, crashed or error ·
4 compare --fail-on: worse · 5 compare --fail-on: too noisy to tell · 130 interrupted, by Ctrl-C;
143 by SIGTERM, 129 by SIGHUP
"""

import re
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import typer

from longseq_bench import __version__
from longseq_bench.cli.compare import compare
from longseq_bench.cli.launch import launch
from longseq_bench.cli.listing import doctor, listing, models
from longseq_bench.cli.maxlen import maxlen
from longseq_bench.cli.options import describe
from longseq_bench.cli.plan import plan
from longseq_bench.cli.recommend import recommend
from longseq_bench.cli.report import report
from longseq_bench.cli.scaling import scaling
from longseq_bench.cli.show import show
from longseq_bench.cli.sweep import sweep
from longseq_bench.core.errors import LauncherError, UserError, keep_lines, shorten
from longseq_bench.launchers.interrupts import received_signals

BAD_INPUT, FAILED_TRIALS, REGRESSED, TOO_NOISY, INTERRUPTED = 2, 3, 4, 5, 130
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="longseq",
    help="Measure how long a sequence an attention can take on this hardware, and how fast.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(command: Callable[..., int], name: str | None = None, **settings: Any) -> None:
    """Add a command. Join the lines of each paragraph of its help, which a terminal wraps."""
    help_text = re.sub(r"(?<!\n)\n(?!\n)", " ", describe(command))
    app.command(name, help=help_text, short_help=help_text.split("\n")[0], **settings)(command)


_add(sweep)
_add(maxlen)
_add(launch, context_settings={"allow_interspersed_args": False})
for _command in (recommend, plan, scaling, report, show, compare):
    _add(_command)
_add(listing, "list")
for _command in (models, doctor):
    _add(_command)


def _version(is_requested: bool) -> None:
    if is_requested:
        print(f"longseq {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        _check_no_empty(arguments)
        code = int(app(args=list(arguments), prog_name="longseq", standalone_mode=False) or 0)
        # newer versions of typer return it for Ctrl-C
        return _report_interrupt() if code == INTERRUPTED else code
    except _UsageError as error:
        # typer 0.28 and newer pass on the words of pydantic
        error.message = keep_lines(error.message.removeprefix("Value error, "))
        error.show(file=sys.stderr)
        return BAD_INPUT
    except (UserError, LauncherError) as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _report_interrupt()
    except typer.Exit as end:
        return end.exit_code
    except OSError as error:
        if not error.filename:
            raise
        return _refuse(f"{error.filename} can't be used: {error.strerror}")


def _check_no_empty(arguments: Sequence[str]) -> None:
    """Raise UserError for an option with an empty value, as by a shell variable that is not set."""
    for word, following in pairwise([*arguments, "-"]):
        name, has_value, value = word.partition("=")
        if name.startswith("--") and not (value if has_value else following):
            raise UserError(f"{name} is empty; give it a value, or leave it out")


def _refuse(message: str) -> int:
    print(f"longseq: {keep_lines(shorten(message))}", file=sys.stderr)
    return BAD_INPUT


def _report_interrupt() -> int:
    """Print what interrupted the command, and return its exit code, as shells count it."""
    number = received_signals[0] if received_signals else signal.SIGINT
    by = f" by {signal.Signals(number).name}" if received_signals else ""
    print(f"longseq: interrupted{by}; every finished record is on disk", file=sys.stderr)
    return 128 + number
