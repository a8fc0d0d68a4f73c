"""The ``fivefold`` command. Nothing here imports torch: a mistake is reported before that takes its seconds."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from .. import __version__, recipes
from ..config import overrides
from ..config.errors import ConfigError
from . import common, list_recipes, prepare, schedule, show, train, verify
from .help import print_fields
from .launch import RankError

COMMANDS: Final = MappingProxyType(
    {
        "train": train,
        "verify": verify,
        "show": show,
        "recipes": list_recipes,
        "schedule": schedule,
        "prepare": prepare,
    }
)
"""Each has SUMMARY, EXAMPLES, ``arguments(parser)`` and ``run(args, overrides) -> status``."""
WITH_RECIPE: Final = ("train", "verify", "show")
"""The commands that take a recipe and overrides."""
NOT_OURS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""What a disk refuses, where a traceback would tell nothing more."""
FIRST_RANK_STAYS_S: Final = 1.0
OTHER_RANKS_STAY_S: Final = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; the exit status is 0, 1 (it failed), 2 (it was not legal) or 128 + a signal."""
    common.hold_off(common.started_ranks())
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        return _report(error.problems)
    except RankError as error:
        if error.problems:
            return _report(error.problems)
        sys.stderr.write(error.details)
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NOT_OURS:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _report(problems: Sequence[str]) -> int:
    """Print each problem, on the first of several started ranks only; the status of a command that is not legal.

    All ranks find the same problems, and ``torchrun`` stops the others when one ends: so each stays until the slowest
    has surely come here, and the first, which speaks, not as long as the others.
    """
    ranks = common.started_ranks()
    common.hold_off(ranks)
    if ranks is None or ranks.rank == 0:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
    if ranks is not None:
        time.sleep(FIRST_RANK_STAYS_S if ranks.rank == 0 else OTHER_RANKS_STAY_S)
    return 2


def _run(argv: list[str]) -> int:
    parser, parsers = _parsers()
    command = next((word for word in argv if not word.startswith("-")), None)
    given: dict[str, str] = {}
    if command in WITH_RECIPE:
        argv, given = overrides.split(argv)
        args, stray = parser.parse_known_args(argv)
        if args.help:
            return _help(parsers[command], args)
        if args.recipe is None:
            raise ConfigError([f"RECIPE is missing. Use {recipes.choices()}."])
        given |= _shorthands(args)
        given |= _stray(stray)
    else:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
    return COMMANDS[args.command].run(args, given)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="fivefold",
        description="Train large language models on any mix of parallelisms, and prove any layout equal to one device.",
        epilog="`fivefold COMMAND --help` tells more.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fivefold {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {line}" for line in command.EXAMPLES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=name not in WITH_RECIPE,
            allow_abbrev=False,
        )
        command.arguments(parsers[name])
    return parser, parsers


def _help(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    parser.print_help()
    if args.recipe is None:
        print(f"\nEvery field can be set: --group.field value. `{parser.prog} RECIPE --help` lists them.")
    else:
        print_fields(recipes.load(args.recipe), common.console())
    return 0


def _shorthands(args: argparse.Namespace) -> dict[str, str]:
    """The command's own options that set a field, as overrides; the layout where it takes just one."""
    values = {"parallel": args.parallel, "train.init_from": getattr(args, "init_from", None)}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _stray(words: Sequence[str]) -> dict[str, str]:
    """Words that are no argument of the command, as overrides: they are reported with the closest field."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value
        elif name and not found[name]:
            found[name] = word
        else:
            found[word] = ""
    return found


if __name__ == "__main__":
    sys.exit(main())
