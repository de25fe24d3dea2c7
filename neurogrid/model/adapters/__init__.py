"""Adapters beside a model's linear layers (LoRA): read from PEFT's files, cut into a part for each layer, applied.

A part is a blob like that of a layer, so that it travels and is kept as one (protocol_spec/sessions.md, "Adapters").
Rows of one pass may have adapters of their own.
"""

from neurogrid.model.adapters.layer_adapter import Adapter, LayerAdapter, max_part_bytes
from neurogrid.model.adapters.peft_files import PeftAdapter, read_peft
from neurogrid.model.adapters.row_adapters import RowAdapters
from neurogrid.model.adapters.source import AdapterSource, cut_adapter

__all__ = [
    "Adapter",
    "AdapterSource",
    "LayerAdapter",
    "PeftAdapter",
    "RowAdapters",
    "cut_adapter",
    "max_part_bytes",
    "read_peft",
]
