"""Train on the bundled digits from Python: what `gredp train` does, with its record and checkpoints."""

import argparse

from gredp.app.settings import TrainSettings
from gredp.app.train import train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--epsilon", type=float, default=2.0)
parser.add_argument("--accountant", choices=["pld", "rdp"], default="pld")
parser.add_argument("--out", help="folder of the run; must not exist yet")
arguments = parser.parse_args()

settings = TrainSettings(
    epochs=arguments.epochs,
    epsilon=arguments.epsilon,
    accountant=arguments.accountant,
    out=arguments.out,
)
settings.check()
run = train(settings)
guarantee = run.record["guarantee"]
print(f"test accuracy {run.record['test_accuracy']:.3f} at proven ε = {guarantee['proven_epsilon']:.3f}")
print(f"record, model and checkpoints are in {run.folder}")
