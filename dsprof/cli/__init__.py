"""The command line: a file a verb, each with a function `command`. Light to import, so that --help is quick."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import keyword
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from dsprof import __version__
from dsprof.launch import LaunchError
from dsprof.run import RunError
from dsprof.settings import SettingsError

from .split import split_at_job

VERBS: Final = (
    "run",
    "runs",
    "live",
    "capture",
    "report",
    "tensorboard",
    "analyze",
    "import",
    "export",
    "doctor",
    "knobs",
    "whatif",
    "fix",
    "compare",
    "tune",
    "plan",
    "build",
)
"""Each the name of its module, with `_` after it where Python has that word for itself."""
USAGE: Final = 2
COLLECTED_AT: Final = 10_000
"""So many more objects than there were, and not 700, have garbage collected where the process is dsprof's own: what is
imported is none, and to look for some takes 6 % of the CPU time of `dsprof analyze` of a small run."""

# Typer's own Click is private, and not always Click; the class above all usage errors is reached through a public one.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dsprof {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Find out why a distributed training job is slow, what to change, and how much that will help."""


def build_app(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The application with these verbs; by default with every one there is."""
    app = typer.Typer(
        name="dsprof",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in verbs:
        name = f"{__name__}.{verb}{'_' if keyword.iskeyword(verb) else ''}"
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        if verb == "run":
            app.command(
                verb,
                options_metavar="[FLAGS]",
                context_settings={
                    "allow_interspersed_args": False,
                    "token_normalize_func": lambda token: token.replace("_", "-"),
                },
            )(module.command)
        else:
            app.command(verb)(module.command)
    return app


def takes_value(command: Any = None) -> dict[str, bool]:
    """Of each flag of `dsprof run` whether a value follows it. command: the whole application's, if it is there."""
    command = command or typer.main.get_command(build_app())
    options = [param for param in command.commands["run"].params if param.param_type_name == "option"]
    return {name: not param.is_flag for param in options for name in param.opts}


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit status; 2 for what the user can mend, said in one line.

    argv: what follows the program's name; None: the process is this program's, and `sys.argv` has it.
    """
    if argv is None:
        gc.set_threshold(COLLECTED_AT)
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if words[0].endswith(".py"):
        return _complain(f"{words[0]}: not a verb; write `dsprof run {words[0]}`")
    typed = tuple(words)
    # Of a verb that is typed only its own module is needed: all of them take longer than many a command.
    command: Any = typer.main.get_command(build_app(words[:1] if words[0] in VERBS else VERBS))
    if words[0] == "run":
        job = 1 + split_at_job(words[1:], takes_value(command))
        if job < len(words):  # Typer is to leave all of it alone, a `--` included
            words.insert(job, "--")
    try:
        status = command.main(words, prog_name="dsprof", standalone_mode=False, obj=typed)
    except UsageError as error:
        return _complain(_one_line(error))
    except LaunchError as error:
        return _complain(str(error), error.status)
    except (RunError, SettingsError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def _complain(text: str, status: int = USAGE) -> int:
    print(f"[dsprof] error: {text}", file=sys.stderr)
    return status


def _one_line(error: Any) -> str:
    path = error.ctx.command_path if error.ctx else "dsprof"
    message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".?")
    return f"{message}; see {path} --help"
