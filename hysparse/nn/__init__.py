"""The model as Flax NNX modules, one idea per file; knows nothing of training or storage."""
