"""Entry point of `longseq`; imports nothing itself: each trial's process imports it again."""

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from longseq_bench.cli import run
    except KeyboardInterrupt:
        sys.exit(130)
    except (Exception, SystemExit) as error:
        _exit_for_hidden_module(error)
    try:
        from longseq_bench.cli.stdout import open_missing_streams
        from longseq_bench.launchers.interrupts import interrupt_on_termination

        open_missing_streams()
        interrupt_on_termination()
        code = run(sys.argv[1:])
    except (ImportError, AttributeError, SyntaxError) as error:
        _exit_for_hidden_module(error)
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


def _exit_for_hidden_module(error: BaseException) -> None:
    """Explain an error in an import if a file hides a module that is needed; else raise it."""
    from longseq_bench.core.hidden_modules import explain_hidden_modules

    hidden = explain_hidden_modules()
    if not hidden:
        raise error
    print(f"longseq: {type(error).__name__}: {error}{hidden}", file=sys.stderr)
    sys.exit(2)


def _leave_current_folder() -> None:
    """Take the current folder, which `python -m` puts first, out of Python's path.

    It may hold anything, such as a psutil.py in a folder of results. If this package itself lies
    there, it is searched last.
    """
    current = sys.path[0]
    sys.path[:] = [folder for folder in sys.path[1:] if folder]
    package = __file__.rpartition("/")[0].rpartition("/")[0]
    if package == current and current not in sys.path:
        sys.path.append(current)


if __name__ == "__main__":
    if __spec__ and not sys.flags.safe_path:
        _leave_current_folder()
    main()
