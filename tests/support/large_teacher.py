"""A teacher of running-sums: a larger tiny model with the same tokenizer, taught by demonstrations that think."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from tests.support.mesh_command import run_command
from tests.support.suite import locked, shared_folder
from trainer.sft.data import read_recipe
from trainer.sft.tiny_model import build_model, save_policy
from trainer.sft.train import warm_start

WIDTH, LAYERS = 128, 3


def large_teacher() -> Path:
    """Its folder: taught once for all tests and workers (40 s of one core), until 98 of 100 sampled answers are right."""
    folder = shared_folder() / "large-teacher"
    with locked("large-teacher"):
        if not folder.exists():
            with TemporaryDirectory(dir=shared_folder()) as scratch:
                demonstrations = Path(scratch) / "demonstrations"
                written = ["--task", "running-sums", "--seed", "7", "--out", str(demonstrations)]
                done = run_command(["demonstrations", *written])
                assert done.code == 0, done.err
                recipe = read_recipe(demonstrations)
                # Without the phase that teaches a policy to answer at once.
                think = msgspec.structs.replace(recipe.phases[0], stop_at_accuracy=0.98, learning_rate=1e-3, steps=600)
                threads = torch.get_num_threads()
                torch.set_num_threads(1)
                model = warm_start(
                    demonstrations,
                    msgspec.structs.replace(recipe, phases=[think]),
                    11,
                    lambda _: None,
                    build_model(11, hidden_size=WIDTH, layers=LAYERS),
                )
                torch.set_num_threads(threads)
                save_policy(model, Path(scratch) / "model")
                (Path(scratch) / "model").rename(folder)
    return folder
