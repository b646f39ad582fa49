"""What tests here share with those of the explorer: places for engines, and explorers attached to them."""

from tests.explorer.conftest import double as double
from tests.explorer.conftest import doubles as doubles
from tests.explorer.conftest import places as places
from tests.explorer.conftest import running_explorer as running_explorer
