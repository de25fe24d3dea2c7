"""Causal language models of text configs that transformers knows inside larger models alone.

A few families (Qwen2.5-VL) come with images only: transformers has their base model of text, and no class with a head
that could be built for it. That head is the same in all: one matrix.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = ["has_text_model", "know_text_model"]


def has_text_model(config_class: type[PreTrainedConfig]) -> bool:
    """Whether a causal language model can be built of such configs."""
    return config_class in MODEL_FOR_CAUSAL_LM_MAPPING or _base_of(config_class) is not None


def know_text_model(config_class: type[PreTrainedConfig]) -> None:
    """Have `AutoModelForCausalLM` know the model of such configs, if it has none and one can be made."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    base = _base_of(config_class)
    if base is not None:
        # `exist_ok`: without it, configs of transformers itself are passed over in silence.
        AutoModelForCausalLM.register(config_class, _with_head(config_class, base), exist_ok=True)


def _base_of(config_class: type[PreTrainedConfig]) -> Any | None:
    if not config_class.__name__.endswith("TextConfig") or config_class not in MODEL_MAPPING:
        return None
    base: Any = MODEL_MAPPING[config_class]
    return None if isinstance(base, (list, tuple)) else base


def _with_head(config_type: type[PreTrainedConfig], base: Any) -> Any:
    parent: Any = base.__bases__[0]

    class TextForCausalLM(parent, GenerationMixin):  # type: ignore[misc]  # both without types
        """A base model of text and its head."""

        # transformers looks for the class of the config here; a name of this function would be none of the module's.
        __annotations__ = {"config": config_type}
        config_class = config_type
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  as transformers has it

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = base(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            inputs_embeds: Any = None,
            use_cache: Any = None,
            logits_to_keep: int = 0,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
            hidden_BTD = output.last_hidden_state
            kept_BTD = hidden_BTD[:, -logits_to_keep:] if logits_to_keep else hidden_BTD
            return CausalLMOutputWithPast(
                logits=self.lm_head(kept_BTD), past_key_values=output.past_key_values
            )

    return TextForCausalLM
