"""Train a job. Without a TOML file, train the default job, which takes a few minutes on a CPU."""

import os
import shutil
import sys
from typing import Any

from torchtitan.tools import signals

if __name__ == "__main__":
    # Handle signals before the imports, which take seconds.
    signals.at_start.start()

import torch

from torchtitan import train
from torchtitan.commands import DEFAULT_JOB, names_job


def main() -> None:
    """Read the command line and train."""
    arguments = sys.argv[1:]
    if names_job(arguments):
        return train.main()
    sys.argv[1:] = [f"--job.config_file={DEFAULT_JOB}", *arguments]
    train.main(_default_trainer)


def _default_trainer(config: Any) -> Any:
    from torchtitan.commands.source import MODEL_FOLDER
    from torchtitan.generation.sampling import generate
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer

    class DefaultTrainer(Trainer):
        """Exports the trained model, continues a prompt with it, and logs a command to try next."""

        def train(self) -> None:
            super().train()
            is_real = self.job_config.comm.mode == "default"
            if not is_real or self.step < self.num_steps:  # dry run, or stopped early
                return
            folder = os.path.join(self.job_config.job.dump_folder, MODEL_FOLDER)
            self.save_hf(folder)
            prompt = "Return a list of"
            if self.parallel_dims.world_size == 1:
                ids = torch.tensor(self.tokenizer.encode(prompt, add_bos=True), device=self.device)
                with self.eval_mode():
                    drawn = generate(self.model_parts[0], ids, max_new_tokens=24, temperature=0)
                logger.info(f"the model continues: {self.tokenizer.decode(drawn[0].tolist())!r}")
            python = os.path.relpath(sys.executable)
            program = "torchtitan" if shutil.which("torchtitan") else f"{python} -m torchtitan"
            logger.info(f'go on with: {program} generate {folder} --prompt "{prompt}"')

    return DefaultTrainer(config)


if __name__ == "__main__":
    main()
