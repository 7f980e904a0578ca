"""The bytes of documents that are too large for a row: in a local folder or in an S3 bucket."""
