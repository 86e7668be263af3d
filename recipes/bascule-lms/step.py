"""Three steps of a small net in double precision; prints each loss and a gradient to the last bit."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)  # the tests of other packages run beside it
layers = [torch.nn.Conv2d(1, 16, 3, padding=1)]
for _ in range(6):
    layers += [torch.nn.GELU(), torch.nn.Conv2d(16, 16, 3, padding=1)]
model = torch.nn.Sequential(*layers).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
image = torch.randn(1, 1, 64, 64, dtype=torch.double)
for step in range(3):
    loss = model(image).square().mean()
    loss.backward()
    print(step, loss.item().hex(), layers[0].weight.grad[0, 0, 0, 0].item().hex())
    optimizer.step()
    optimizer.zero_grad()
