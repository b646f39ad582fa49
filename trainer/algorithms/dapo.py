"""DAPO: GRPO with a higher clip above, the mean over tokens, and groups that have a contrast.

    advantage  grpo.py's                                                                 arXiv 2503.14476, eq. 9
    actor      the clipped loss of terms.py, above and below apart, over all tokens       eq. 8

by the name's own defaults: `clip_range_high: 0.28`, `loss_agg_mode: token-mean`, `kl_coef: 0`. A group whose runs have
one score is left out (section 3.2): trainer/batches/selection.py. `overlong.buffer` is the soft punishment (eq. 13).

Left out: sampling of more groups in the place of those without a contrast; the paper has no `dual_clip`.
"""

from tuneloop.trainer.algorithms.grpo import prepare

__all__ = ["prepare"]
