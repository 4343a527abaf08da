"""`python -m megarl.config check|show|reference`: look at a config without starting anything."""

from __future__ import annotations

import argparse
import sys

from megarl.config.check import load_checked
from megarl.config.load import load, to_yaml
from megarl.config.reference import markdown
from megarl.errors import run_main


def main(argv: list[str]) -> None:
    """Run one command; mistakes are raised as UserMistake."""
    parser = argparse.ArgumentParser(prog="python -m megarl.config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("check", "find mistakes, without a cluster"),
                       ("show", "print the effective config, defaults included")):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key.path=value")
    commands.add_parser("reference", help="print the reference of all keys in Markdown")
    arguments = parser.parse_args(argv)
    if arguments.command == "check":
        _, report = load_checked(arguments.file, arguments.overrides)
        for note in report.notes:
            print(f"note: {note}")
        print(f"{arguments.file}: ok: {report.summary}")
    elif arguments.command == "show":
        print(to_yaml(load(arguments.file, arguments.overrides)), end="")
    else:
        print(markdown(), end="")


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
