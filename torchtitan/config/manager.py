from torchtitan.config.job_config import JobConfig


class ConfigManager:
    def __init__(self, config_cls: type[JobConfig] = JobConfig) -> None:
        self.config_cls = config_cls
        self.config = config_cls()

    def parse_args(self, args: list[str] | None = None) -> JobConfig:
        raise NotImplementedError("the config manager is being written")
