"""The version, which results and pages record."""

VERSION = "0.1.0"
