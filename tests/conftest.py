"""Every test runs on one CPU thread: bits may depend on the thread count, speed on two cores too."""
import torch

torch.set_num_threads(1)
