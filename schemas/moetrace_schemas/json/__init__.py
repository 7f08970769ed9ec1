"""Published JSON Schemas of the documents that moetrace writes."""
