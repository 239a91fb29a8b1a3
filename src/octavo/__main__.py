"""The `octavo` command, which `python -m octavo` is as well."""

import sys


def main() -> None:
    """Runs the command line and exits. An interrupt is brief wherever it comes."""
    try:
        from octavo.cli.main import main as run

        run()
    except KeyboardInterrupt:  # `run` has most of them itself
        print("octavo: error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
