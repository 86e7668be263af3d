"""Three steps of a small net under LMS, whose tensors come from the compiled page pool."""

import torch

import lms
from lms.torch.cpu import page_pool

torch.set_num_threads(1)  # the tests of other packages run beside it
pool = page_pool.find()
assert pool is not None, f"the page pool is not for PyTorch {torch.__version__}"
model = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with lms.LMS(model, optimizer, budget="2MB") as session:
    for _ in range(3):
        model(torch.ones(1, 4, 256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pool.installed
    assert pool.usage().peak >= 4 * 256 * 256 * 4, pool.usage()  # one of its tensors at least
assert session.stats()["swapped_in"] > 0
