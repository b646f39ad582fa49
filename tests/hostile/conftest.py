"""What tests here share with those of the explorer: places for engines."""

from tests.explorer.conftest import places as places
