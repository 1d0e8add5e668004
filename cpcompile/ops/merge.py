"""The sum of attention over several sets of keys, from the output and log-sum-exp (LSE) over each.

Legend: B batch, H heads, T query rows, E head dim of the values.
"""

from __future__ import annotations

import math

import torch


def merge(
    out_BHTE: torch.Tensor, lse_BHT: torch.Tensor, other_out_BHTE: torch.Tensor, other_lse_BHT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE over both sets of keys, in the dtype of the first (FlashAttention-2, Dao 2023, section 2.3.1).

    An LSE of -inf (nothing was visible) on either side, or on both, leaves the other side as it is.
    """
    weight = torch.sigmoid(other_lse_BHT - lse_BHT)
    weight = torch.where(other_lse_BHT == -math.inf, 0.0, weight)  # both -inf: their difference is no number
    other = other_out_BHTE.to(out_BHTE.dtype)
    out = torch.lerp(out_BHTE, other, weight.to(out_BHTE.dtype).unsqueeze(-1))
    return out, torch.logaddexp(lse_BHT, other_lse_BHT)
