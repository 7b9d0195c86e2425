"""A network that sees what another policy would do: the advice goes past its hidden layers, straight to the outputs.

So it begins as that policy, and what is learnt is when to do something else (the idea of learning on top of a given
controller: residual policy learning, Silver et al. 2018). Where nothing was learnt, the advice stands.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.torch_layers import MlpExtractor

from envs.spaces import NOTHING
from policies.advice_input import ADVICE_ENTRIES

# An advised action leads by this much: more than doing nothing does before anything is learnt.
ADVICE_FIRST: Final = 8.0


class PastHidden(MlpExtractor):
    """Hidden layers for the observation; the advice behind it joins what they come to, for the actor alone."""

    def __init__(self, feature_dim: int, **settings: Any) -> None:
        super().__init__(feature_dim - ADVICE_ENTRIES, **settings)
        self.latent_dim_pi += ADVICE_ENTRIES

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.policy_net(features[:, :-ADVICE_ENTRIES])
        return torch.cat([hidden, features[:, -ADVICE_ENTRIES:]], dim=1)

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward_critic(features[:, :-ADVICE_ENTRIES])


class AdvisedPolicy(ActorCriticPolicy):
    """For PPO."""

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = _extractor(self)


class AdvisedMaskablePolicy(MaskableActorCriticPolicy):
    """For MaskablePPO."""

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = _extractor(self)


def _extractor(policy: ActorCriticPolicy | MaskableActorCriticPolicy) -> PastHidden:
    return PastHidden(
        policy.features_dim, net_arch=policy.net_arch, activation_fn=policy.activation_fn, device=policy.device
    )


def follow_advice(action_net: torch.nn.Linear) -> None:
    """Make an untrained output layer do what is advised."""
    hidden = action_net.in_features - ADVICE_ENTRIES
    with torch.no_grad():
        action_net.weight[:, hidden:] = 0.0
        for entry in range(ADVICE_ENTRIES):
            action_net.weight[NOTHING + 1 + entry, hidden + entry] = ADVICE_FIRST


class AdviceAsItIs(RunningMeanStd):
    """Statistics that leave the advice alone: its entries are 0 or 1 for the network, too."""

    def __init__(self, entries: int, epsilon: float) -> None:
        super().__init__(shape=(entries,))
        self._epsilon = epsilon
        self._leave()

    def update_from_moments(self, batch_mean: NDArray[Any], batch_var: NDArray[Any], batch_count: float) -> None:
        super().update_from_moments(batch_mean, batch_var, batch_count)
        self._leave()

    def _leave(self) -> None:
        self.mean[-ADVICE_ENTRIES:] = 0.0
        self.var[-ADVICE_ENTRIES:] = np.float64(1.0 - self._epsilon)  # to which normalising adds it
