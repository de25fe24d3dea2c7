"""transformers' Trainer as a member of a run: one more callback.

python examples/train_with_trainer.py            # the first; prints what the others join it by
python examples/train_with_trainer.py WHERE      # the others, on this machine

For other machines leave out `listen`: then it prints a ticket, which leads there.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import neurogrid

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
model = LlamaForCausalLM(config)
samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
if len(sys.argv) > 1:
    callback = neurogrid.NeuroGridCallback(sys.argv[1])
else:
    callback = neurogrid.NeuroGridCallback(every=4, listen=["/ip4/127.0.0.1/tcp/0"])
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory, max_steps=10, report_to=[], save_strategy="no", disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(f"sum of all weights: {weights.double().sum():.9f}")
