"""The path of 0.2.x for `torchtitan compare`, which takes the same options."""

from torchtitan.commands.compare import main

if __name__ == "__main__":
    main()
