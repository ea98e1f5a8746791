"""The live page: what the server does now and did in the last quarter of an hour, without anything from elsewhere."""
