"""Tiny random models that take a second to build: real Hugging Face folders, a few hundred kilobytes each.

The weights are random but not small (initializer_range 0.15), so that greedy ids differ from one position to the next
and a mistake in attention, positions or masks changes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")

HIDDEN_SIZE = 64
LAYERS = 4
HEADS = 4
KV_HEADS = 2

PAD_TOKEN = "<|pad|>"
BOS_TOKEN = "<|begin|>"
EOS_TOKEN = "<|end|>"

# What the tokenizer's merges are learnt from; any text would do, and this one is ours.
_CORPUS = (
    "A request becomes a sequence. A sequence holds blocks, and each block holds slots for keys and values.",
    "The scheduler hands out tokens: one to each running sequence, then chunks of the waiting prompts.",
    "Once upon a time there was a server that answered every question it was asked, one token at a time.",
    "def add(left, right):\n    return left + right\n",
    "数据从请求到设备，再从设备回到请求。",
)


def build_tiny_model(
    directory: Path,
    architecture: str = "llama",
    *,
    vocab_size: int = 320,
    max_position_embeddings: int = 1024,
    seed: int = 20,
    config_overrides: dict[str, Any] | None = None,
    dtype: Any = None,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors and tokenizer.json of a random model.

    Args:
        directory: created when missing; the files go straight into it.
        architecture: one of ARCHITECTURES.
        vocab_size: at least 259: three special tokens and every byte; what is above are learnt merges.
        max_position_embeddings: positions of the model.
        seed: of the weights; the same seed gives the same files.
        config_overrides: further fields of the transformers config.
        dtype: a torch dtype to store the weights in; float32 when left out.

    Returns:
        `directory`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(vocab_size, adds_bos=architecture == "llama")
    config = _config(architecture, tokenizer, max_position_embeddings, config_overrides or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype or torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_tiny_tokenizer(directory: Path, *, vocab_size: int = 320, chat_template: str | None = None) -> Path:
    """Write the tokenizer's files alone; it puts BOS before what it encodes."""
    tokenizer = _tokenizer(vocab_size, adds_bos=True)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer(vocab_size: int, *, adds_bos: bool) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN]
    smallest = len(specials) + 256
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be at most {tokenizer.get_vocab_size()}, got {vocab_size}")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, tokenizer.token_to_id(BOS_TOKEN))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN
    )


def _config(
    architecture: str, tokenizer: PreTrainedTokenizerFast, max_position_embeddings: int, overrides: dict[str, Any]
) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.15,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "gpt2":
        sizes = {"n_embd": HIDDEN_SIZE, "n_layer": LAYERS, "n_head": HEADS, "n_positions": max_position_embeddings}
        return GPT2Config(**common | sizes | overrides)
    rotary: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    sizes = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN_SIZE // HEADS,
        "max_position_embeddings": max_position_embeddings,
    }
    return rotary[architecture](**common | sizes | overrides)
