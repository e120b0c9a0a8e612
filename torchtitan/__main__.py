from torchtitan.commands import main

if __name__ == "__main__":
    main()
