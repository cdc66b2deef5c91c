"""kvtier inside other inference engines."""
