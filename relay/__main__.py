"""`python -m relay`: the command line, also where the command `relay` is not on the PATH."""

from relay.cli import main

if __name__ == "__main__":
    main(prog_name="relay")
