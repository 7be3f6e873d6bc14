"""`python -m relay`: the command line where the `relay` command is not on the PATH."""

from relay.cli import main

if __name__ == "__main__":
    main(prog_name="relay")
