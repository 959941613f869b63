"""`fly tune`: which configuration decodes fastest on this machine (docs/configuration.md)."""
