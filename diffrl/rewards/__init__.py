"""Rewards: the protocol of a plugin, how plugins are found, and how images are scored (`diffrl.rewards.scoring`)."""

from diffrl.rewards.protocol import Card, Embedder, Metadata, Reward, RewardError, Unscored
from diffrl.rewards.registry import available, load_reward

__all__ = ["Card", "Embedder", "Metadata", "Reward", "RewardError", "Unscored", "available", "load_reward"]
