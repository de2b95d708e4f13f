"""Estimators by the name they have in a config."""

from gruppo.advantage.gdpo import GDPOAdvantage
from gruppo.advantage.grpo import DRGRPOAdvantage, GRPOAdvantage, LitePPOAdvantage
from gruppo.advantage.inputs import Advantage
from gruppo.advantage.length import LEADAdvantage, LengthShapedAdvantage, OPOAdvantage
from gruppo.advantage.passk import BestOfGroupAdvantage, PassAtKAdvantage
from gruppo.advantage.reinforce import (
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    ReMaxAdvantage,
)
from gruppo.advantage.rloo import RLOOAdvantage
from gruppo.advantage.success import BetaNormAdvantage, GPGAdvantage, MaxRLAdvantage

ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": GRPOAdvantage,
    "rloo": RLOOAdvantage,
    "drgrpo": DRGRPOAdvantage,
    "lite_ppo": LitePPOAdvantage,
    "reinforce_pp": ReinforcePlusPlusAdvantage,
    "reinforce_pp_baseline": ReinforcePlusPlusBaselineAdvantage,
    "remax": ReMaxAdvantage,
    "gdpo": GDPOAdvantage,
    "opo": OPOAdvantage,
    "gpg": GPGAdvantage,
    "maxrl": MaxRLAdvantage,
    "beta_norm": BetaNormAdvantage,
    "pass_at_k": PassAtKAdvantage,
    "best_of_group": BestOfGroupAdvantage,
    "length_shaped": LengthShapedAdvantage,
    "lead": LEADAdvantage,
}
