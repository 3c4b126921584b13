"""Tasks and metrics: how good a model is, beside baselines over the same tokens."""
