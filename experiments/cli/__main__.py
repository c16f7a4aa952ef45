"""`python -m experiments.cli` is the command `evenflow`."""

from experiments.cli import main

if __name__ == "__main__":
    main()
