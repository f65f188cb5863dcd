"""What to build: sizes and behaviour of a demo model, and the config.json that says so."""

from dataclasses import dataclass

from tokenizers import Tokenizer

FULL_ATTENTION_INTERVAL = 4
CONV_KERNEL = 4

# The vision tower that the architecture has and the demo never runs.
VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class DemoSpec:
    """Sizes are named as in config.json; the default head sizes suit vLLM's CUDA kernels as well as the CPU's.

    Raises ValueError for an `acceptance` outside (0, 1].
    """

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    max_position_embeddings: int = 32768
    acceptance: float = 0.65
    """Share of the chain's tokens after which the MTP head drafts right; the same at each position."""
    context_scale: float = 0.05
    """Size of what each attention, GDN or MLP block adds to a residual stream that starts with size 1."""
    sharpness: float = 28.0
    """Logit of the next token of the chain while the blocks add nothing; the others get a tenth of it or so."""
    fallback: float = 0.55
    """Logit of the first of `weights.FALLBACK`, as a share of `sharpness`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.acceptance <= 1:
            raise ValueError(f"acceptance is {self.acceptance}, must be above 0 and at most 1")

    @property
    def layer_types(self) -> list[str]:
        """Three GDN layers, then one of full attention, and so on."""
        full = [(index + 1) % FULL_ATTENTION_INTERVAL == 0 for index in range(self.num_hidden_layers)]
        return ["full_attention" if is_full else "linear_attention" for is_full in full]


# Every logit depends on the whole context, few are sharp, and there is no sense in what it writes.
CONTEXTUAL = DemoSpec(context_scale=2.0, sharpness=20.0, fallback=0.0)


def make_config(spec: DemoSpec, tokenizer: Tokenizer) -> dict:
    """The content of config.json."""
    pairs = spec.head_dim // 4 // 2  # a quarter of each head turns, in pairs, shared out to time, height and width
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": spec.num_hidden_layers,
        "layer_types": spec.layer_types,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_num_key_heads": spec.linear_num_key_heads,
        "linear_num_value_heads": spec.linear_num_value_heads,
        "linear_key_head_dim": spec.linear_key_head_dim,
        "linear_value_head_dim": spec.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": spec.max_position_embeddings,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        },
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": VISION | {"out_hidden_size": spec.hidden_size},
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
