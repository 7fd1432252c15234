"""Model formats of other programs that trainshort can import or convert. Each format is one module."""
