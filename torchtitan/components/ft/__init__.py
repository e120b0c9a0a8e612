from torchtitan.components.ft.manager import *  # noqa: F403
