"""The path of 0.2.x for `torchtitan estimate`, which takes the same options."""

from torchtitan.estimate.__main__ import main

if __name__ == "__main__":
    main()
