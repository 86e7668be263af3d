"""PyTorch over libddl: the backend "ddl" of torch.distributed.

`import torch` registers it by itself (entry point group torch.backends), so a script needs no import of this package.
"""
