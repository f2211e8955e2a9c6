"""What the five examples of Opacus do, call by call, with the package's name changed in their imports."""

import math

import pytest
import torch
import torch.nn.functional as F
from gredp.grad_sample.functorch import make_functional
from gredp.utils.batch_memory_manager import BatchMemoryManager
from gredp.utils.uniform_sampler import UniformWithReplacementSampler
from gredp.validators import ModuleValidator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gredp import GredpError, PrivacyEngine
from gredp.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from gredp.layers import DPGRU, DPLSTM, DPRNN

DELTA = 1e-5


def images(count: int = 32, channels: int = 1, size: int = 28) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    return TensorDataset(torch.randn(count, channels, size, size, generator=generator), labels)


def right(model: nn.Module, loader: DataLoader) -> float:
    """The share that is right, in eval mode."""
    model.eval()
    with torch.no_grad():
        hits = [model(x).argmax(1).eq(y) for x, y in loader]
    return torch.cat(hits).float().mean().item()


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 8, 2, padding=3), nn.Conv2d(4, 8, 4, 2)
        self.hidden, self.last = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.second(x)), 2, 1)
        return self.last(F.relu(self.hidden(x.view(-1, 8 * 4 * 4))))


@pytest.mark.parametrize("secure", [False, True])
def test_mnist(tmp_path, secure):
    loader, results = DataLoader(images(), batch_size=8, num_workers=0, pin_memory=False), []
    for _ in range(2):  # runs to average: the second one starts from the first one's loader
        model = SmallConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
        engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        for _ in range(2):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.CrossEntropyLoss()(model(x), y)
                loss.backward()
                optimizer.step()
        assert 0 < engine.accountant.get_epsilon(delta=DELTA) < math.inf
        results.append(right(model, DataLoader(images(), batch_size=16, shuffle=True)))
    torch.save(results, tmp_path / "results.pt")
    torch.save(model._module.state_dict(), tmp_path / "model.pt")
    SmallConvNet().load_state_dict(torch.load(tmp_path / "model.pt"))


def small_images_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


@pytest.mark.parametrize(
    ("mode", "optimizer", "per_layer"),
    [("hooks", "SGD", False), ("functorch", "Adam", True), ("ew", "RMSprop", False)],
)
def test_cifar10(tmp_path, mode, optimizer, per_layer):
    loader = DataLoader(images(40, 3, 8), batch_size=10)
    model = DPDDP(ModuleValidator.fix(small_images_net()))
    assert not ModuleValidator.validate(model, strict=True)
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    clip = 10.0
    if per_layer:
        count = len([p for p in model.parameters() if p.requires_grad])
        clip = [10.0 / math.sqrt(count)] * count
    engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.5,
        max_grad_norm=clip,
        clipping="per_layer" if per_layer else "flat",
        grad_sample_mode=mode,
    )
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / 2))
        model.train()
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
            for x, y in parts:
                output = model(x)
                loss = nn.CrossEntropyLoss()(output, y)
                output.detach().cpu().numpy().argmax(axis=1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                epsilon = engine.accountant.get_epsilon(delta=DELTA)
        right(model, DataLoader(images(20, 3, 8), batch_size=10))
        state = {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "checkpoint.tar")
    assert len(engine.accountant) == 8
    assert 0 < epsilon < math.inf


def test_cifar10_with_gradients_of_its_own_is_rejected():
    model = small_images_net()
    with pytest.raises(GredpError, match="have no certificate"):
        make_functional(model)


class Names(Dataset):
    """Words of different length, a class for each ending."""

    def __init__(self, count: int = 24) -> None:
        self.words = [(torch.arange(2 + i % 4) + i % 3, torch.tensor(i % 3)) for i in range(count)]

    def __getitem__(self, i):
        return self.words[i]

    def __len__(self) -> int:
        return len(self.words)


def padded(batch):
    x = pad_sequence([x for x, _ in batch], batch_first=True, padding_value=0)
    return x, torch.stack([y for _, y in batch]).long()


class LettersNet(nn.Module):
    def __init__(self, recurrent, layers: int = 1, **options) -> None:
        super().__init__()
        self.letters = nn.Embedding(10, 6)
        self.recurrent = recurrent(6, 8, num_layers=layers, batch_first=True, **options)
        self.out = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x, hidden=None):
        x, _ = self.recurrent(self.letters(x), hidden)
        return self.out(x[:, -1, :])


def of_opacus(name):
    return lambda *args, **options: getattr(pytest.importorskip("opacus").layers, name)(*args, **options)


@pytest.mark.parametrize(
    ("recurrent", "options"),
    [
        (DPLSTM, {}),
        (DPGRU, {"bidirectional": True}),
        (DPRNN, {"layers": 2}),
        (of_opacus("DPLSTM"), {}),
        (of_opacus("DPGRU"), {}),
    ],
)
def test_char_lstm_classification(tmp_path, recurrent, options):
    data = Names()
    train, test = torch.utils.data.random_split(data, [20, 4])
    model = LettersNet(recurrent, **options)
    loader = DataLoader(train, batch_size=5, collate_fn=padded)
    criterion = nn.CrossEntropyLoss()
    if not hasattr(model.recurrent, "to_stock"):  # Opacus' own class
        model = ModuleValidator.fix(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.5
    )
    for _ in range(2):
        model.train()
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logits.argmax(-1).eq(y).sum()
    epsilon = engine.get_epsilon(delta=8e-5)
    assert engine.accountant.get_privacy_spent(delta=8e-5)[0] == epsilon
    torch.save(right(model, DataLoader(test, batch_size=4, collate_fn=padded)), tmp_path / "accuracy.pt")
    assert 0 < epsilon < math.inf


def test_what_an_example_imports_and_does_not_use_is_no_obstacle():
    with pytest.raises(GredpError, match="make_private builds the loader"):
        UniformWithReplacementSampler(num_samples=10, sample_rate=0.1)


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False),
        nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def test_dcgan(tmp_path):
    """The discriminator alone is private: the generator sees the records through it."""
    judge, maker = ModuleValidator.fix(discriminator()), ModuleValidator.fix(generator())
    draws = torch.Generator().manual_seed(0)  # none of them is empty
    loader = DataLoader(images(24, 1, 16), batch_size=6, shuffle=True, generator=draws)
    criterion = nn.BCELoss()
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    judge, of_judge, loader = engine.make_private(
        module=judge, optimizer=of_judge, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    before = [p.clone() for p in (*judge.parameters(), *maker.parameters())]
    steps = 0
    for real, _ in loader:
        of_judge.zero_grad(set_to_none=True)
        size = len(real)
        fake = maker(torch.randn(size, 5, 1, 1))
        on_fake = criterion(judge(fake.detach()), torch.full((size,), 0.0))
        on_real = criterion(judge(real), torch.full((size,), 1.0))
        (on_real + on_fake).backward()
        of_judge.step()
        of_judge.zero_grad(set_to_none=True)
        of_maker.zero_grad()
        criterion(judge(fake), torch.full((size,), 1.0)).backward()
        of_maker.step()
        steps += 1
        assert engine.get_epsilon(DELTA) > 0
    torch.save(maker.state_dict(), tmp_path / "maker.pt")
    assert len(engine.accountant) == steps == 4
    assert all((a != b).any() for a, b in zip(before, (*judge.parameters(), *maker.parameters())))


class WordsNet(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.pool = nn.Embedding(words, 8), nn.AdaptiveAvgPool1d(1)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.pool(self.words(x).transpose(1, 2)).squeeze(2)
        return self.out(F.relu(self.hidden(x)))


def padded_rows(batch):
    x = pad_sequence([row["input_ids"] for row in batch], batch_first=True, padding_value=0)
    return x, torch.stack([row["label"] for row in batch]).long()


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("poisson", [True, False])
def test_imdb(tmp_path, poisson):
    rows = [{"input_ids": 1 + torch.arange(2 + i % 5), "label": torch.tensor(i % 2)} for i in range(30)]
    loader = DataLoader(rows, batch_size=6, collate_fn=padded_rows, shuffle=True)
    model = WordsNet(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.56,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
    )
    for _ in range(2):
        model = model.train()
        for x, y in loader:
            optimizer.zero_grad()
            predictions = model(x).squeeze(1)
            loss = nn.CrossEntropyLoss()(predictions, y)
            loss.backward()
            optimizer.step()
        assert 0 < engine.get_epsilon(DELTA) < math.inf
        right(model, DataLoader(rows, batch_size=10, collate_fn=padded_rows))
    assert len(engine.accountant) == 10
    torch.save(model._module.state_dict(), tmp_path / "model.pt")
