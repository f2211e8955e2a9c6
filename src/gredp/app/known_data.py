"""The data sets that are known by name, all that is known of each in one entry. No torch."""

from dataclasses import dataclass

EMBEDDED = "digits"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
#: the network of images that are not known
MODEL = "model3"


@dataclass(frozen=True)
class KnownData:
    """Its classes and usual network, where it comes from, and what it must be; digits come with scikit-learn.

    `sums` are the SHA-256 of the raw arrays, computed from byte-exact copies of the original files. `parts`
    are those of equal runs of training images, to put them in their original order: a mirror may keep the
    order of an archive.
    """

    classes: int
    model: str
    repository: str = ""
    image: str = ""
    label: str = ""
    shape: tuple[int, ...] = ()
    train: int = 0
    test: int = 0
    sums: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, m = self.train, self.test
        return dict(zip(ARRAYS, ((n, *self.shape), (n,), (m, *self.shape), (m,))))


KNOWN = {
    EMBEDDED: KnownData(10, "lenet-small"),
    "mnist": KnownData(
        10, "lenet5", "ylecun/mnist", "image", "label", (28, 28), 60_000, 10_000,
        (
            "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        ),
    ),
    # Its publishers give checksums of compressed files only, from which those of the arrays do not follow.
    "fashion-mnist": KnownData(
        10, "lenet5", "zalando-datasets/fashion_mnist", "image", "label", (28, 28), 60_000, 10_000
    ),
    "cifar10": KnownData(
        10, "model3", "uoft-cs/cifar10", "img", "label", (32, 32, 3), 50_000, 10_000,
        (
            "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        ),
        (
            "fc115a3de050d667b88cbd5b0b9612ebf996c54230fe7758f3a14bb5af9a1c27",
            "89e609b642f687bc796fa3bfa4211005582a0e8131d463d996d11ddb297d312e",
            "93a365823e61729490a8801d80864ccd0ab1e8c98f19d71af65644d1c5f1486e",
            "809eb95ecd057a36516318f5023ea619009dd70dd38193db9da43125a928e6fa",
            "d05b7d66d216d6df882cc760cdc0ff2f1f0437abf699ed16005c021ef0add9cb",
        ),
    ),
    "cifar100": KnownData(
        100, "model3", "uoft-cs/cifar100", "img", "fine_label", (32, 32, 3), 50_000, 10_000,
        (
            "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
            "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
            "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
            "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
        ),
    ),
}  # fmt: skip


def fetchable() -> list[str]:
    """Names that `gredp data get` takes."""
    return [name for name, known in KNOWN.items() if known.repository]


def usual_model(name: str) -> str:
    return KNOWN[name].model if name in KNOWN else MODEL
