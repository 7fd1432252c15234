"""The attention backends. Each backend is an implementation of `attend` that can be chosen by name."""
