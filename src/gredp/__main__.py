"""The `gredp` command; one line where its extra is not installed."""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `gredp` and `python -m gredp`."""
    try:
        from gredp.app import cli

        cli.main(arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "gredp":
            raise
        print(f"gredp: the command line needs {error.name}: pip install 'gredp[cli]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
