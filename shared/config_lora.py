"""The settings of training an adapter in place of all weights: `model.lora` in the YAML."""

from shared.config_kinds import NotNegative, Positive, Section

#: What the linear layers of most models are called: all of attention and of the feed-forward part.
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(Section):
    """A low-rank adapter; `rank: 0` trains all weights instead. An `alpha` of null is twice the rank."""

    rank: NotNegative = 0
    alpha: Positive | None = None
    targets: tuple[str, ...] = _LINEAR

    @property
    def alpha_used(self) -> int:
        """The adapter's alpha: what it adds is scaled by alpha over rank."""
        return self.alpha or 2 * self.rank
