"""Advantage estimators and their registry."""
