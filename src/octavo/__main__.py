"""The `octavo` command, which `python -m octavo` is as well."""

import sys


def main() -> None:
    """Runs the command line and exits. An interrupt during the imports is as brief as one later."""
    try:
        from octavo.cli.main import main as run
    except KeyboardInterrupt:
        print("octavo: error: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
