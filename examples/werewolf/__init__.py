"""Werewolf: two wolves, whose model is tuned by the games they win, against four villagers who follow a script."""
