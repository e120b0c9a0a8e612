"""tinker-cookbook's DPO on pairs of a right and a wrong sum; its own recipe loads pairs from a hub.

python examples/rl/tinker_cookbook/dpo.py sums.jsonl base_url=http://127.0.0.1:8000 max_steps=20
"""

import sys

import chz
import datasets
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


@chz.chz
class Sums(ComparisonDatasetBuilder):
    """The conversations of assets.py; the rejected answer is one too large."""

    path: str

    def get_train_and_test_datasets(self):
        return datasets.Dataset.from_json(self.path), None

    def example_to_labeled_comparison(self, example):
        *prompt, answer = example["messages"]
        wrong = answer | {"content": str(int(answer["content"]) + 1)}
        return LabeledComparison(Comparison(prompt, [answer], [wrong]), "A")


def main(path: str, **settings: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer="local/bytes",
        renderer_name="role_colon",
        max_length=128,
        batch_size=16,
    )
    builder = DPODatasetBuilderFromComparisons(
        common_config=common, comparison_builder=Sums(path=path)
    )
    train_dpo.main(
        train_dpo.Config(
            log_path=settings.get("log_path", "dpo"),
            model_name="local/bytes",
            recipe_name="sums",
            renderer_name="role_colon",
            dataset_builder=builder,
            learning_rate=1e-3,
            save_every=0,
            eval_every=0,
            base_url=settings.get("base_url"),
            load_checkpoint_path=settings.get("load_checkpoint_path"),
            max_steps=int(settings.get("max_steps", "20")),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], **dict(argument.split("=", 1) for argument in sys.argv[2:]))
