"""`python -m services COMMAND …` is `rollmesh COMMAND …`, for where the console script is not on the path."""

from services.cli import main

if __name__ == "__main__":
    main()
