"""Versions: how they are loaded, evaluated, compared, promoted, attested and taken back."""
