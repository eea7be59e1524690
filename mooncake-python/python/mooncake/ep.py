"""Names of `mooncake.pg`, which older programs import from here."""

from mooncake.pg import *
from mooncake.pg import __all__ as __all__
