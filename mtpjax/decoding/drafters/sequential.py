"""Sequential MTP modules as a drafter (DeepSeek-V3 2412.19437; one module reused: FastMTP 2509.18362).

The modules are `mtpjax.models.mtp.sequential`, how they draft `mtpjax.decoding.drafters.pairs`.
"""

from mtpjax.decoding.drafters.base import Drafter
from mtpjax.decoding.drafters.pairs import pair_drafter
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp import MTPConfig, sequential_stack


def sequential(
    trunk: ModelConfig,
    config: MTPConfig,
    depth: int = 1,
    candidates: int = 1,
    sample: bool = True,
    dtype: str = "float32",
) -> Drafter:
    """A drafter of MTP modules; their parameters (`mtpjax.models.mtp.init_params`) are `generate`'s `drafter_params`.

    Args:
        trunk: shape of the target, one of our models.
        config: the modules.
        depth: drafted tokens a step; at most `depth_modules` unless one module is reused.
        candidates: chains drafted side by side; their first tokens are drawn without replacement.
        sample: draw from the processed law of each row (the q of rejection sampling), or always take the arg-max.
        dtype: of the modules' computation and cache; best the target's.

    Raises:
        UserError: a depth or number of candidates that the modules can't draft, or modules that don't fit the trunk.
    """
    return pair_drafter("sequential", sequential_stack(trunk, config, dtype), depth, candidates, sample)
