"""Train your own network privately: five lines are new."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.app.data import load

data = load("digits")
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=256)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, method="gredp",
    target_epsilon=2.0, target_delta=1e-5, epochs=10, max_grad_norm=1.0,
)  # fmt: skip

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

model.eval()
accuracy = (model(data.x_test).argmax(1) == data.y_test).float().mean().item()
print(f"test accuracy {accuracy:.3f} at proven ε = {engine.get_epsilon(1e-5):.3f}")
