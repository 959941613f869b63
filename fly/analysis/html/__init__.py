"""`fly report`: runs become plain JSON values in one HTML page; the page computes no statistics."""
