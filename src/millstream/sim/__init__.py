"""The real scheduler on hardware that is not there: `millstream simulate` and `serve --device sim`."""
