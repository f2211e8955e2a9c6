"""The features that need no file, by the name that `--features` has for them."""

from gredp.app.features.patches import Patches
from gredp.app.features.scattering import Scattering

FRONTS: dict[str, type[Scattering] | type[Patches]] = {"scattering": Scattering, "patches": Patches}
