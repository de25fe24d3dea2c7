"""A run of an image classifier with batch normalisation, over two members."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from tests.e2e.training.run_processes import RunProcesses, used_samples
from tests.ports import free_port

SIDE = 16
RUN_FILE = """
[model]
config = "model.json"
kind = "image-classification"
[data]
path = "pictures"
held_out = 0.2
slice_samples = 64
[stop]
epochs = 6
[inner]
lr = 3e-3
batch_samples = 16
[outer]
every = 4
fragments = 1
method = "diloco"
[eval]
every = 4
[members]
min = 2
"""


def draw(directory: Path) -> None:
    """Pictures of two kinds: stripes that lie, and stripes that stand, in any place and colour."""
    chance = random.Random(0)
    for name, lies in (("lying", True), ("standing", False)):
        folder = directory / name
        folder.mkdir(parents=True)
        for number in range(160):
            colour = tuple(chance.randrange(120, 256) for _ in range(3))
            begin, width = chance.randrange(4), chance.randrange(2, 4)
            picture = Image.new("RGB", (SIDE, SIDE))
            for x in range(SIDE):
                for y in range(SIDE):
                    if ((y if lies else x) + begin) // width % 2:
                        picture.putpixel((x, y), colour)
            picture.save(folder / f"{number}.png")


def test_two_members_learn_to_tell_pictures_apart(tmp_path: Path) -> None:
    draw(tmp_path / "pictures")
    config = {
        "model_type": "resnet",
        "num_channels": 3,
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "num_labels": 2,
    }
    (tmp_path / "model.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    run = RunProcesses(tmp_path, free_port())
    try:
        run.lead("--local-workers", "2")
        checkpoint = run.end()
    finally:
        run.close()
    accuracies = [line["eval_accuracy"] for line in run.figures() if "eval_accuracy" in line]
    assert accuracies[-1] > 0.9
    assert set(used_samples(run.run).values()) == {6}
    model = AutoModelForImageClassification.from_pretrained(checkpoint)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, SIDE, SIDE)).logits.shape == (1, 2)
