"""The features that need no file, by the name that `--features` has for them."""

from gredp.app.features.patches import Patches
from gredp.app.features.scattering import Scattering
from gredp.app.features.writing import Writing

FRONTS: dict[str, type[Scattering] | type[Patches] | type[Writing]] = {
    "scattering": Scattering,
    "patches": Patches,
    "writing": Writing,
}
