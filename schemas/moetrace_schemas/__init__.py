"""The contracts of moetrace: names, closed sets, packed columns, identity. Standard library only."""

SCHEMA_VERSION = 1
"""Version of the wire contract. A reader refuses a higher one; see schemas/README.md for what raises it."""

__all__ = ["SCHEMA_VERSION"]
