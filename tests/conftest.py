"""Every test runs on one CPU thread: bits and speed depend on the thread count."""

import torch

torch.set_num_threads(1)
