"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys

_LACKING = (ImportError, AttributeError, SyntaxError)
"""Errors by which a module that hides another shows, though none is raised in its own code."""


def main() -> None:
    """Run the command line and end with its exit code."""
    _leave_unnamed_folder()
    try:
        from longseq_bench.cli import run
    except KeyboardInterrupt:
        sys.exit(130)
    except (Exception, SystemExit) as error:
        _exit_for_import(error)
    try:
        from longseq_bench.cli.stdout import open_missing_streams
        from longseq_bench.launchers.interrupts import interrupt_on_termination

        open_missing_streams()
        interrupt_on_termination()
        code = run(sys.argv[1:])
    except (Exception, SystemExit) as error:
        if not _find_module(error) and not isinstance(error, _LACKING):
            raise
        _exit_for_import(error)
    if code > 128:  # interrupted
        import signal

        # a second Ctrl-C would end what is cleaned up at the exit with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # an interrupt during an `exec` of text, such as in dataclasses, leaves a mark, for which
        # `python -m` ends by SIGINT whatever the exit code; another `exec` removes it
        exec("")
    import gc

    # the interpreter would search all records for cycles before it ends: 0.5 s for 100,000
    gc.disable()
    sys.exit(code)


def _find_module(error: BaseException) -> str:
    """Return the file of the module that raised an error while it was imported, else ""."""
    found, trace = "", error.__traceback__
    while trace:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        found = code.co_filename if code.co_name == "<module>" else found
    return found


def _exit_for_import(error: BaseException) -> None:
    """Explain an error in an import if a file hides a module that is needed; else raise it.

    A module that ends the program is always named: its exit code may be that of success.
    """
    from longseq_bench.core.hidden_modules import explain_hidden_modules

    what = f"{type(error).__name__}: {error}"
    hidden = explain_hidden_modules()
    if isinstance(error, SystemExit):
        what = f"{_find_module(error) or 'a module'} ended the program when it was imported"
    elif not hidden:
        raise error
    print(f"longseq: {what}{hidden}", file=sys.stderr)
    sys.exit(2)


def _leave_unnamed_folder() -> None:
    """Take the current folder out of Python's path if only an empty item of PYTHONPATH names it.

    PYTHONPATH=$PYTHONPATH:/mine has such an item if the variable was not set.
    """
    from os import environ, getcwd, pathsep
    from os.path import abspath

    items = environ.get("PYTHONPATH", "").split(pathsep)
    named = [item for item in items if item]
    if not named or len(named) == len(items) or sys.flags.ignore_environment:
        return
    environ["PYTHONPATH"] = pathsep.join(named)
    try:
        current, kept = getcwd(), [abspath(item) for item in named]
    except FileNotFoundError:  # the folder was deleted, so nothing is imported from it
        return
    if current not in kept:
        _leave(current)


def _leave_current_folder() -> None:
    """Take the current folder, which `python -m` puts first, out of Python's path.

    It may hold anything, such as a psutil.py in a folder of results.
    """
    current = sys.path.pop(0)
    if current not in sys.path:
        _leave(current)


def _leave(folder: str) -> None:
    """Take a folder out of Python's path. If this package itself lies there, put it last."""
    sys.path[:] = [other for other in sys.path if other not in ("", folder)]
    if __file__.rpartition("/")[0].rpartition("/")[0] == folder:
        sys.path.append(folder)


if __name__ == "__main__":
    if __spec__ and not sys.flags.safe_path:
        _leave_current_folder()
    main()
