"""Model formats that can be imported or converted: one module per format."""
