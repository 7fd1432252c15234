"""`python -m trainshort`, which is how torchrun starts it."""

from trainshort.cli import main

if __name__ == "__main__":
    main()
