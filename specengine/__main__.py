"""`python -m specengine`: the command line."""

from specengine.cli.main import main

if __name__ == "__main__":
    main()
