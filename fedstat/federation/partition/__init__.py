"""The data of one analysis, as an analyst sees them: made, described, drawn, connected."""
