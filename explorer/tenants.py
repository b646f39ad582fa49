"""Whose requests these are."""

#: Everybody's, while there are no keys that tell tenants apart.
TENANT = "default"
