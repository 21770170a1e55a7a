"""`python -m torchplug`: the command line, where the script is not on the path."""

from torchplug.cli import main

if __name__ == "__main__":
    main()
