"""Run the command line with `python -m trainshort`, for example from torchrun."""

from trainshort.cli.main import main

if __name__ == "__main__":
    main()
