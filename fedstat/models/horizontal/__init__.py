"""What families over sites with different rows share."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.horizontal.evaluation import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
