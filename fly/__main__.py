"""`python -m fly` is the command `fly`."""

from fly.cli.main import main

if __name__ == "__main__":
    main()
