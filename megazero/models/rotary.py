"""Rotary position encoding (Su et al. 2021, arXiv:2104.09864), in Hugging Face's convention of two halves."""

from __future__ import annotations

import math

import torch

from megazero.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of features, (head_size / 2,) float32 on the CPU.

    Always float32 and always computed on the CPU, so that every device rotates by the same angles.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device="cpu") / config.head_size
    wavelengths = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / wavelengths
    if scaling.type == "linear":
        # Position interpolation (Chen et al. 2023, arXiv:2306.15595).
        return 1.0 / wavelengths / scaling.factor
    length = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.type == "llama3":
        return _llama3(wavelengths, scaling, length)
    return _yarn(wavelengths, scaling, length, config)


def amplitude(config: ModelConfig) -> float:
    """Factor on cos and sin: 1, or YaRN's attention temperature (Peng et al. 2023, arXiv:2309.00071, section 3.4)."""
    scaling = config.rope_scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def tables(inv_freq: torch.Tensor, factor: float, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each (N, D) float32, of integer ``positions`` (N,); both halves of D hold the same angles.

    ``inv_freq`` (D/2,) on the positions' device and ``factor`` come from the two functions above.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x_BShD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's feature pairs (i, i + D/2) by its token's angles, in float32; same dtype out.

    ``cos``, ``sin``: (1 or B, S, 1, D).
    """
    first, second = x_BShD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BShD * cos + turned * sin).to(x_BShD.dtype)


def _llama3(wavelengths: torch.Tensor, scaling: RopeScaling, length: int) -> torch.Tensor:
    """Llama 3.1: short waves kept, long ones stretched, between them a blend linear in the turns over ``length``."""
    frequencies = 1.0 / wavelengths
    tokens_per_turn = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = (length / tokens_per_turn - low) / (high - low)
    blended = (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
    blended = torch.where(tokens_per_turn < length / high, frequencies, blended)
    return torch.where(tokens_per_turn > length / low, frequencies / scaling.factor, blended)


def _yarn(wavelengths: torch.Tensor, scaling: RopeScaling, length: int, config: ModelConfig) -> torch.Tensor:
    """YaRN, "NTK-by-parts" (Peng et al. 2023, arXiv:2309.00071, section 3.2), the blend linear in the pair's index.

    The blend's ends are the indices whose frequency turns ``beta_fast`` and ``beta_slow`` times over the
    original length, rounded outwards, as in the authors' code.
    """
    size = config.head_size

    def index_turning(times: float) -> float:
        return size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(index_turning(scaling.beta_fast)), 0)
    last = min(math.ceil(index_turning(scaling.beta_slow)), size - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share
