"""Put this folder on sys.path, so that tests in subfolders can import its helper modules."""
