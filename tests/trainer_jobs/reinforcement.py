"""stable-baselines3: PPO on environments in processes of their own; many updates after each time of playing."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv


class Follow(gymnasium.Env[np.ndarray, np.ndarray]):
    """The action should be the sum of what is seen; a step of it takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (16,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.seconds = seconds
        self.seen = np.zeros(16, np.float32)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        self.seen = self.np_random.uniform(-1, 1, 16).astype(np.float32)
        return self.seen, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        time.sleep(self.seconds)
        reward = -abs(float(action[0]) - float(self.seen.mean()))
        self.seen = self.np_random.uniform(-1, 1, 16).astype(np.float32)
        return self.seen, reward, False, False, {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    played = make_vec_env(
        Follow, n_envs=2, seed=0, env_kwargs={"seconds": options.seconds}, vec_env_cls=SubprocVecEnv,
        vec_env_kwargs={"start_method": "fork"},
    )  # fmt: skip
    model = PPO(
        "MlpPolicy", played, n_steps=64, batch_size=32, n_epochs=4, seed=0, device="cpu",
        policy_kwargs={"net_arch": [256, 256]},
    )  # fmt: skip
    model.learn(64 * 2 * 6, callback=CheckpointCallback(200, "ppo"))
    weights = model.policy.parameters_to_vector()
    Path("losses.0.json").write_text(json.dumps([float(weights.sum()), float(np.abs(weights).sum())]))
    played.close()
