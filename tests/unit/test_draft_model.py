"""A draft model beside the model that it writes ahead for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from neurogrid.inference.generation.draft_model import DraftModel
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.speculation.acceptance import PassCosts
from neurogrid.inference.speculation.draft_pace import DraftPace, DraftRecord
from neurogrid.model.embedded import embedded_model_path
from neurogrid.node.torch_thread import TorchThread

EMBEDDING = "model.embed_tokens.weight"
NUM_MORE = 8


def with_rows_more(path: Path) -> Path:
    """The embedded model with rows behind those of its tokens, each of which is likelier than any token."""
    shutil.copytree(embedded_model_path(), path)
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] += NUM_MORE
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    largest_VD = tensors[EMBEDDING]
    largest_D = 8 * largest_VD[largest_VD.float().norm(dim=-1).argmax()]
    rows = [
        largest_D * (-1) ** number for number in range(NUM_MORE)
    ]  # one of them is on either side
    tensors[EMBEDDING] = torch.cat([largest_VD, torch.stack(rows)])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class SeenPace(DraftPace):
    """A pace that keeps in mind what was drafted, proposed or not."""

    def __init__(self) -> None:
        super().__init__(PassCosts(), DraftRecord())
        self.seen: list[int] = []

    def goes_on(self, token_id: int, probability: float) -> bool:
        self.seen.append(token_id)
        return super().goes_on(token_id, probability)


async def test_a_draft_has_no_tokens_that_its_model_lacks(tmp_path: Path) -> None:
    target = LoadedModel.load(embedded_model_path(), name=None, max_seq_len=128, dtype=None)
    tokens = target.tokenizer.encode("def main() -> None:")
    with TorchThread() as thread:
        draft_model = DraftModel.load(with_rows_more(tmp_path / "draft"), target, thread)
        num_rows = draft_model.model.ends.vocab_size
        assert num_rows == target.ends.vocab_size + NUM_MORE
        pace = SeenPace()
        draft = draft_model.draft(pace)
        assert draft is not None
        for _ in range(4):
            await draft.propose(tokens, 4, least_gain=1.0)
            tokens.append(5)
            draft.came(5)
        draft.close()
    assert pace.seen
    assert max(pace.seen) < target.ends.vocab_size
