"""`python -m trainshort`, which is how torchrun starts it."""

from trainshort.cli.main import main

if __name__ == "__main__":
    main()
