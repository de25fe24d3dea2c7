"""Three workers train an adapter of a model that none of them has room for: a stage is never there twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.e2e.preloaded import DEADLINE, ENVIRONMENT
from tests.e2e.training.run_processes import RUN_FILE, STAGE_PROGRAM, open_run, program_below
from tests.ports import free_port

MIB = 2**20
NUM_LAYERS, NUM_WORKERS = 12, 3
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
# Of few tokens: activations are to count for little beside weights.
RUN = (
    RUN_FILE.replace("model.json", "model")
    .replace("batch_tokens = 256", "batch_tokens = 8")
    .replace("sequence_length = 32", "sequence_length = 8")
    + """
precision = "bfloat16"
[layout]
stages = 3
micro_batches = 1
[adapter]
r = 2
targets = ["q_proj"]
[stop]
steps = 6
[eval]
every = 0
"""
)
# Not forked from one of the tests: what a process shares is to be that of its own worker.
WORKER = ("/usr/bin/env", sys.executable, "-m", "neurogrid.cli.commands.worker")
# A step, and pages of libraries that are first needed then.
STEP = 70 * MIB


def bytes_of(path: Path, key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", path.read_text())
    assert found is not None
    return int(found[1]) * 1024


def base_bytes() -> int:
    """What a stage's process takes that has no stage yet."""
    code = "import peft, neurogrid.training.stages.stage_program; print(open('/proc/self/status').read())"
    told = subprocess.run(
        ["/usr/bin/env", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
    )
    found = re.search(r"VmRSS:\s+(\d+) kB", told.stdout)
    assert found is not None
    return int(found[1]) * 1024


def test_no_worker_has_room_for_the_model_or_for_its_stage_twice(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    whole = sum(each.nbytes for each in model.parameters())
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    stage = layer * NUM_LAYERS // NUM_WORKERS
    del model
    base = base_bytes()
    limit = base + stage + layer + STEP
    assert limit < base + 2 * stage < base + whole
    with open_run(tmp_path, free_port(), RUN) as run:
        # Each worker imports all by itself.
        run.lead("--wait", str(DEADLINE))
        names = [f"worker-{number}" for number in range(NUM_WORKERS)]
        for name in names:
            run.join(name, "--memory-limit", str(limit), program=WORKER)
        run.wait_round(3)
        peaks = [
            bytes_of(Path(f"/proc/{program_below(worker.pid, STAGE_PROGRAM)}/status"), "VmHWM")
            for worker in run.workers.values()
        ]
        run.end()
    assert "do not fit" not in run.log
    for peak in peaks:
        assert base + stage * 0.9 < peak < limit, [each / MIB for each in (base, stage, *peaks)]
