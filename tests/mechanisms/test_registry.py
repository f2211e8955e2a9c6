"""A method is one file that registers itself: everything else asks the registry."""

from dataclasses import dataclass

import pytest

from gredp.app.compare import ComparedRun
from gredp.app.settings import TrainSettings
from gredp.budget import quote
from gredp.errors import GredpError
from gredp.mechanisms import Mechanism, Method, mechanism, methods, register, registry


@dataclass(frozen=True)
class Louder(Mechanism):
    """DP-SGD with `factor` times its noise; `filter_ratio` is a setting that `gredp train` has."""

    clipping: str = "flat"
    factor: float = 2.0
    filter_ratio: float = 0.25
    name = "louder"
    in_paper = False

    def step(self, plan, sigma, expected_batch_size):
        return plan.scaled(self.factor)


@pytest.fixture
def louder(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", methods())
    register(Method("much-louder", Louder, "Louder", "#123456", block=4))


def test_a_registered_method_is_known_to_all(louder):
    assert mechanism("louder", factor=3.0) == Louder(factor=3.0)
    assert quote(method="louder", sigma=1.0).noise_multiplier == pytest.approx(2.0)
    settings = TrainSettings(method="louder", filter_ratio=0.5)
    settings.check()
    assert (settings.block_size, settings.options()) == (4, {"filter_ratio": 0.5})
    assert ComparedRun("much-louder", 0, {}, 1).arguments[:4] == ["--method", "louder", "--noise", "white"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"claim": "paper"}, "the paper makes no claim about louder: use claim 'proven'"),
        ({"noise": "real"}, "noise 'real' belongs to method 'gredp', not to 'louder'"),
        ({"pitch": 1}, "louder has no option pitch"),
    ],
)
def test_what_a_registered_method_does_not_have_is_refused(louder, told, message):
    with pytest.raises(GredpError, match=message):
        mechanism("louder", **told)


def test_no_two_methods_share_a_name_a_color_or_a_noise():
    known = methods().values()
    assert len({m.label for m in known}) == len({m.color for m in known}) == len(known)
    pairs = [(m.method, noise) for m in known for noise in m.noises]
    assert len(set(pairs)) == len(pairs)
    assert all(registry.find(m.method, noise) is m for m in known for noise in m.noises)


def test_options_are_listed_with_their_defaults():
    options = {name: method.kind.options() for name, method in methods().items()}
    assert options["plain"] == {}
    assert options["spectral-dp"]["filter_ratio"] == 0.5
    assert options["shaped"]["exponent"] == 0.5
